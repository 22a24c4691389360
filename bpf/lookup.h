/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From what a client dials to the backend that it gets. Touches the maps, never a packet or a
 * socket, so that every program decides alike.
 */
#ifndef EBPFLB_LOOKUP_H
#define EBPFLB_LOOKUP_H

#include "maps.h"

#define NSEC_PER_SEC 1000000000ULL

/* How often a word is read again when a slot is not the service port's own. */
#define WORD_READS 4

/* What became of a look-up. */
enum verdict {
	FORWARD,	 /* to the backend that was chosen */
	UNTOUCHED,	 /* not ours to translate here */
	LEFT_TO_PACKETS, /* ours, but only its packets tell whether, or how */
	REJECT,		 /* no endpoint anywhere */
	REJECT_POLICY,	 /* none that the policy allows */
	REJECT_RANGE,	 /* the client is in no source range */
	REJECT_FOREIGN,	 /* the maps contradict each other */
};

struct backend_address {
	__be32 address[4];
	__be16 port;
};

/* By what a client dials: each path has affinity records of its own. */
enum affinity_path {
	PATH_SOCKET = 0,
	PATH_PACKET = 1,
};

/* Who dials, as far as policies, source ranges and affinity care. Asked only where it matters. */
struct client {
	u64 who[2]; /* whom affinity is for: a network namespace's cookie, or the address */
	u32 path;
	bool host; /* of a packet: from a process of this node */
	bool pod;  /* … or from a pod, as far as that can be told */
	const struct settings *set;
};

struct choice {
	struct backend_address to;
	u8 port_flags;
	u8 flags; /* enum backend_flag; the packet path's alone */
};

static __always_inline void count(u32 stat)
{
	u64 *n = stats.lookup(&stat);

	if (n)
		__sync_fetch_and_add(n, 1);
}

static __always_inline u32 index_of(u32 id)
{
	return id & ((1U << ABI_ID_INDEX_BITS) - 1);
}

static __always_inline void count_connection(u32 id)
{
	u32 index = index_of(id);
	u64 *n = connections.lookup(&index);

	if (n)
		__sync_fetch_and_add(n, 1);
	count(STAT_TRANSLATED);
}

static __always_inline void copy_address(__be32 *to, const __be32 *from)
{
	to[0] = from[0];
	to[1] = from[1];
	to[2] = from[2];
	to[3] = from[3];
}

static __always_inline bool same_address(const __be32 *a, const __be32 *b)
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

/* --- what is dialled --- */

static __always_inline bool is_ipv4(const __be32 *address)
{
	return !address[0] && !address[1] && address[2] == bpf_htonl(0xffff);
}

static __always_inline bool is_unspecified(const __be32 *address)
{
	return !address[3] && (is_ipv4(address) || (!address[0] && !address[1] && !address[2]));
}

static __always_inline void set_loopback(__be32 *address)
{
	address[3] = is_ipv4(address) ? bpf_htonl(0x7f000001) : bpf_htonl(1);
}

static __always_inline bool is_loopback(const __be32 *address)
{
	if (is_ipv4(address))
		return (address[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	return !address[0] && !address[1] && !address[2] && address[3] == bpf_htonl(1);
}

static __always_inline const struct settings *node_settings(void)
{
	u32 zero = 0;

	return settings.lookup(&zero);
}

static __always_inline bool is_host(u64 netns)
{
	const struct settings *set = node_settings();

	return set && set->host_netns == netns;
}

/* NodePorts on the loopback are this node's own processes' alone (NP-07): not a pod's. */
static __always_inline bool has_loopback_node_ports(const __be32 *address, u64 netns)
{
	u64 flag = is_ipv4(address) ? SETTING_LOOPBACK4 : SETTING_LOOPBACK6;
	const struct settings *set = node_settings();

	return set && set->flags & flag && set->host_netns == netns;
}

static __always_inline bool has_node_ports(const __be32 *address)
{
	struct node_address_key key;

	copy_address(key.address, address);
	return node_addrs.lookup(&key) != NULL;
}

/* The NodePort of this port number, at whichever address it was dialled. */
static __always_inline struct frontend_value *find_node_port(const struct frontend_key *dialled)
{
	struct frontend_key wildcard = *dialled;

	wildcard.address[3] = 0;
	if (!is_ipv4(dialled->address)) {
		wildcard.address[0] = 0;
		wildcard.address[1] = 0;
		wildcard.address[2] = 0;
	}
	return frontends.lookup(&wildcard);
}

/* --- which backend --- */

static __always_inline bool is_member(u32 id, const struct backend_address *backend, u16 role)
{
	struct member_key key = {};

	copy_address(key.address, backend->address);
	key.port = backend->port;
	key.role = role;
	key.id = id;
	return members.lookup(&key) != NULL;
}

/* Any fixed mixing of the whole key will do; never 0, which is what a fresh element may hold. */
static __always_inline u32 affinity_check(const struct affinity_key *key)
{
	u64 mix = key->client[0] * 0x9e3779b97f4a7c15ULL;

	mix ^= key->client[1] * 0xc2b2ae3d27d4eb4fULL;
	mix ^= (((u64)key->path << 32) | key->id) * 0x165667b19e3779f9ULL;
	return (u32)(mix >> 32) | 1;
}

static __always_inline bool recall(struct affinity_key *key, u32 affinity_s, u32 which, u64 now,
				   struct backend_address *backend)
{
	struct affinity_value *found = affinity.lookup(key), value;
	u32 check;

	if (!found)
		return false;
	/*
	 * LRU: the element can become another client's while it is read. The checks make that a
	 * miss, but for a reader that is overtaken twice; is_member() has the last word.
	 */
	value = *found;
	check = affinity_check(key);
	if (value.check_head != check || value.check_tail != check)
		return false;
	if (now - value.used_ns >= affinity_s * NSEC_PER_SEC)
		return false;
	copy_address(backend->address, value.address);
	backend->port = value.port;
	/* MEMBER_CLUSTER and MEMBER_LOCAL are the sets' own numbers. */
	return is_member(key->id, backend, which);
}

static __always_inline void remember(struct affinity_key *key, u64 now,
				     const struct backend_address *backend)
{
	struct affinity_value value = {};

	copy_address(value.address, backend->address);
	value.port = backend->port;
	value.used_ns = now;
	value.check_head = affinity_check(key);
	value.check_tail = value.check_head;
	affinity.update(key, &value);
}

/* Whether it is a process of this node, in the host's network namespace. */
static __always_inline bool is_of_host(const struct client *client)
{
	if (client->path == PATH_PACKET)
		return client->host;
	return client->set->host_netns == client->who[0];
}

/*
 * Whether a client counts as a pod or as this node itself, for externalTrafficPolicy Local (POL-04
 * to -06). A network namespace that is not the host's is a pod's, where pods can be told at all.
 */
static __always_inline bool is_inside(const struct client *client, bool v6)
{
	if (is_of_host(client))
		return true;
	if (client->path == PATH_PACKET)
		return client->pod;
	return client->set->flags & (v6 ? SETTING_TELLS_PODS6 : SETTING_TELLS_PODS4);
}

/* Whether a socket's packets meet the packet path as well. */
static __always_inline bool meets_packets(const struct client *client)
{
	return client->set->state & (is_of_host(client) ? STATE_SEES_HOST : STATE_SEES_PODS);
}

/* The set that a client may choose from. */
static __always_inline u32 set_for(u32 flags, u32 scope, const struct client *client)
{
	if (scope == SCOPE_INTERNAL)
		return flags & PORT_INTERNAL_LOCAL ? SET_LOCAL : SET_CLUSTER;
	if (!(flags & PORT_EXTERNAL_LOCAL))
		return SET_CLUSTER;
	return is_inside(client, flags & PORT_IPV6) ? SET_CLUSTER : SET_LOCAL;
}

static __always_inline bool is_in_range(u32 id, const u64 *source)
{
	struct source_range_key key = { .bits = 8 * (sizeof(key.id) + sizeof(key.address)) };

	key.id = id;
	__builtin_memcpy(key.address, source, sizeof(key.address));
	return source_ranges.lookup(&key) != NULL;
}

/*
 * Source ranges (LB-05, LB-06): of a packet its source says. A socket has none yet; whether this
 * node is in them the plan says (LB-07), and a pod waits for its packets, where they are seen.
 */
static __always_inline enum verdict ask_ranges(u32 flags, u32 id, const struct client *client)
{
	if (!(flags & (PORT_LB_NO_HOST | PORT_LB_NO_PODS | PORT_LB_RANGES)))
		return FORWARD;
	if (is_of_host(client))
		return flags & PORT_LB_NO_HOST ? REJECT_RANGE : FORWARD;
	if (client->path == PATH_PACKET)
		return !(flags & PORT_LB_RANGES) || is_in_range(id, client->who) ? FORWARD :
										   REJECT_RANGE;
	if (flags & PORT_LB_RANGES && meets_packets(client))
		return LEFT_TO_PACKETS;
	return flags & PORT_LB_NO_PODS ? REJECT_RANGE : FORWARD;
}

/*
 * Chooses a backend for a new connection of a client.
 *
 * A published word and the range that it names stay as they are until no program that could have
 * read the word runs any more, so a foreign owner can only mean that the word was read long ago.
 */
static __always_inline enum verdict choose(const struct frontend_value *frontend,
					   const struct client *client, struct choice *chosen)
{
	struct affinity_key key = {};
	u32 id = frontend->id, index = index_of(id), port_flags, flags, slot, which;
	struct port *port;
	struct backend *backend;
	u64 word, now = 0;
	bool found = false;
	int i;

	port = ports.lookup(&index);
	if (!port)
		return REJECT_FOREIGN;

	port_flags = *(volatile u8 *)&port->flags;
	which = set_for(port_flags, frontend->scope, client);
	word = *(volatile u64 *)&port->word[which];
	flags = word >> ABI_WORD_FLAGS_SHIFT;
	if (flags & WORD_UNTOUCHED && client->path == PATH_SOCKET)
		return UNTOUCHED;
	chosen->port_flags = port_flags;
	if (frontend->kind == KIND_LOAD_BALANCER && !(flags & WORD_NONE)) { /* LB-08 */
		enum verdict verdict;

		/*
		 * Ranges close before a word changes and open after it: who looks on both sides of
		 * the word never has the backends of one plan and the ranges of another.
		 */
		port_flags |= *(volatile u8 *)&port->flags;
		verdict = ask_ranges(port_flags, id, client);
		if (verdict != FORWARD)
			return verdict;
	}

	if (flags & WORD_AFFINITY) {
		now = bpf_ktime_get_ns();
		key.client[0] = client->who[0];
		key.client[1] = client->who[1];
		key.path = client->path;
		key.id = id;
		if (recall(&key, port->affinity_s, which, now, &chosen->to)) {
			remember(&key, now, &chosen->to);
			/* The local set is all that new connections may use of this node. */
			if (client->path == PATH_PACKET && is_member(id, &chosen->to, MEMBER_LOCAL))
				chosen->flags = BACKEND_LOCAL;
			return FORWARD;
		}
	}

#pragma unroll
	for (i = 0; i < WORD_READS; i++) {
		u32 backend_count = (word >> ABI_WORD_COUNT_SHIFT) & 0xffffff;

		if (!backend_count)
			return (word >> ABI_WORD_FLAGS_SHIFT) & WORD_NONE_LOCAL ? REJECT_POLICY :
										  REJECT;
		slot = (u32)word + (u32)(((u64)bpf_get_prandom_u32() * backend_count) >> 32);
		backend = backends.lookup(&slot);
		if (backend && backend->owner == id) {
			copy_address(chosen->to.address, backend->address);
			chosen->to.port = backend->port;
			chosen->flags = backend->flags;
			found = true;
			break;
		}
		count(STAT_REREAD);
		word = *(volatile u64 *)&port->word[which];
	}
	if (!found) {
		count(STAT_FOREIGN_BACKEND);
		return REJECT_FOREIGN;
	}
	if (flags & WORD_AFFINITY)
		remember(&key, now, &chosen->to);
	return FORWARD;
}

#endif
