/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flow tables: what is known of a packet's flow, and what the packet changes of that. Touches
 * the maps, never a packet.
 *
 * A flow has two halves, one for each way, under the addresses and ports that a packet of that way
 * has before it is translated. A new flow lives in `flows_new`; the client's first packet after an
 * answer moves it to `conntrack`. So neither a flood of first packets nor the answers to it reach
 * the flows of those who really talk.
 *
 *	forward  {client -> frontend}  target becomes the backend; source port `client_port`
 *	reverse  {backend -> client}   source becomes the frontend; target port `client_port`
 *	foreign  {anybody -> NodePort} nothing becomes of it: it is an answer to others
 *
 * A client that has such a flow and dials the backend itself from the same port has another flow,
 * of no service port (its id is 0): else it would be told that the Service answers.
 */
#ifndef EBPFLB_FLOW_H
#define EBPFLB_FLOW_H

#include "lookup.h"
#include "parse.h"

/* A half says no more often than this that it was used. */
#define USED_NS (NSEC_PER_SEC / 4)
/* The next SYN of a client that nobody answers comes after a second. */
#define SYN_AGAIN_NS (NSEC_PER_SEC / 10 * 9)

/* As netfilter has them by default. */
#define OPENING_NS (120 * NSEC_PER_SEC)
#define TCP_CLOSED_NS (120 * NSEC_PER_SEC)
#define TCP_RESET_NS (10 * NSEC_PER_SEC)
#define SCTP_NS (210 * NSEC_PER_SEC)

/* How many source ports are tried for a flow whose own one is taken. */
#define PORT_TRIES 8
#define FIRST_PORT 1024

#if HAVE_COARSE_TIME
/* Not in the headers of every bcc that we compile with. */
static u64 (*ktime_get_coarse_ns)(void) = (void *)160;
#endif

/* As of the last tick, where the kernel can tell (5.11): exacter time costs as much as a look-up. */
static __always_inline u64 coarse_now(void)
{
#if HAVE_COARSE_TIME
	return ktime_get_coarse_ns();
#else
	return bpf_ktime_get_ns();
#endif
}

enum flow_table {
	NOWHERE = 0,
	NEW,	  /* `flows_new` */
	ANSWERED, /* `conntrack` */
};

/* Any fixed mixing of the whole key will do; never 0, which is what a fresh element may hold. */
static __always_inline u32 flow_check(const struct flow_key *key)
{
	u64 mix = (((u64)key->source[0] << 32) | key->source[1]) * 0x9e3779b97f4a7c15ULL;

	mix ^= (((u64)key->source[2] << 32) | key->source[3]) * 0xc2b2ae3d27d4eb4fULL;
	mix ^= (((u64)key->target[0] << 32) | key->target[1]) * 0x165667b19e3779f9ULL;
	mix ^= (((u64)key->target[2] << 32) | key->target[3]) * 0xd6e8feb86659fd93ULL;
	mix ^= (((u64)key->protocol << 32) | ((u32)key->source_port << 16) | key->target_port) *
	       0xa0761d6478bd642fULL;
	return (u32)(mix >> 32) | 1;
}

/*
 * What is known of packets with this key: a copy, and where it lies (NULL: nowhere). LRU: the
 * element can become another flow's meanwhile. The checks make that a miss, but for a reader that
 * is overtaken twice.
 */
static __always_inline struct flow *find_flow(struct flow_key *key, struct flow *flow,
					      enum flow_table *table)
{
	struct flow *found = conntrack.lookup(key);
	u32 check;

	*table = ANSWERED;
	if (found) {
		*flow = *found;
		check = flow_check(key);
		if (flow->check_head == check && flow->check_tail == check)
			return found;
	}
	found = flows_new.lookup(key);
	*table = NEW;
	if (found) {
		*flow = *found;
		check = flow_check(key);
		if (flow->check_head == check && flow->check_tail == check)
			return found;
	}
	*table = NOWHERE;
	return NULL;
}

/* A flow of this node itself is translated at the other hooks: forward where it leaves. */
static __always_inline bool is_for_hook(const struct flow *flow, bool egress)
{
	bool host = flow->flags & FLOW_HOST;

	if (flow->kind == FLOW_FORWARD)
		return host == egress;
	if (flow->kind == FLOW_REVERSE)
		return host != egress;
	return !egress;
}

/* The key of what answers packets with this one, if nobody translates it. */
static __always_inline void turn_round(const struct flow_key *key, struct flow_key *turned)
{
	__builtin_memset(turned, 0, sizeof(*turned));
	copy_address(turned->source, key->target);
	copy_address(turned->target, key->source);
	turned->source_port = key->target_port;
	turned->target_port = key->source_port;
	turned->protocol = key->protocol;
}

/* The key of the half that is not the one under `key`. */
static __always_inline void other_key(const struct flow_key *key, const struct flow *flow,
				      struct flow_key *other)
{
	bool forward = flow->kind == FLOW_FORWARD;

	copy_address(other->source, forward ? flow->address : key->target);
	copy_address(other->target, forward ? key->source : flow->address);
	other->source_port = forward ? flow->port : flow->client_port;
	other->target_port = forward ? flow->client_port : flow->port;
	other->protocol = key->protocol;
}

/* Makes of the half under `of` the one under `key`, as far as one follows from the other. */
static __always_inline void turn_over(const struct flow_key *of, struct flow *flow,
				      const struct flow_key *key)
{
	bool forward = flow->kind == FLOW_FORWARD;

	flow->check_head = flow_check(key);
	flow->check_tail = flow->check_head;
	flow->kind = forward ? FLOW_REVERSE : FLOW_FORWARD;
	copy_address(flow->address, forward ? of->target : of->source);
	flow->port = forward ? of->target_port : of->source_port;
	flow->client_port = forward ? of->source_port : of->target_port;
}

/* Whether a packet has come this way at all. */
static __always_inline bool is_used(const struct flow *flow)
{
	return flow->used_ns != flow->created_ns;
}

/* Stores the use of a half, if it is time to; returns whether it was. */
static __always_inline bool note_use(struct flow *where, const struct flow *flow, u64 now)
{
	if (is_used(flow) && flow->used_ns > flow->syn_ns && now - flow->used_ns < USED_NS)
		return false;
	where->used_ns = now == flow->created_ns ? now + 1 : now;
	return true;
}

/* Whether `half` lies under `key` and is the other one of the flow that `of` and `flow` tell of. */
static __always_inline bool is_other(const struct flow_key *of, const struct flow *flow,
				     const struct flow_key *key, const struct flow *half)
{
	bool forward = flow->kind == FLOW_FORWARD;

	return half->kind == (forward ? FLOW_REVERSE : FLOW_FORWARD) &&
	       half->port == (forward ? of->target_port : of->source_port) &&
	       half->client_port == (forward ? of->source_port : of->target_port) &&
	       same_address(half->address, forward ? of->target : of->source) &&
	       half->check_tail == flow_check(key);
}

/* Another CPU may have used a half a little after `now`. */
static __always_inline u64 since(u64 then, u64 now)
{
	return (s64)(now - then) > 0 ? now - then : 0;
}

static __always_inline u64 idle_ns(const struct flow *flow, const struct flow *other, u64 now)
{
	u64 idle = since(flow->used_ns, now),
	    other_idle = other ? since(other->used_ns, now) : idle;

	return idle < other_idle ? idle : other_idle;
}

/* Whether both have closed, or one has reset. */
static __always_inline bool is_closed(const struct flow *flow, const struct flow *other)
{
	u8 seen = other ? other->seen : 0;

	return (flow->seen | seen) & FLOW_SEEN_RST || flow->seen & seen & FLOW_SEEN_FIN;
}

static __always_inline bool is_answered(enum flow_table table, const struct flow *flow,
					const struct flow *other)
{
	const struct flow *reverse = flow->kind == FLOW_REVERSE ? flow : other;

	return table == ANSWERED || (reverse && is_used(reverse));
}

/* How long a flow may be silent. */
static __always_inline u64 timeout_of(const struct settings *set, u8 protocol,
				      enum flow_table table, const struct flow *flow,
				      const struct flow *other)
{
	u8 seen = other ? other->seen : 0;

	if (protocol == IPPROTO_UDP)
		return is_answered(table, flow, other) ? set->udp_stream_timeout_ns :
							 set->udp_timeout_ns;
	if (protocol == IPPROTO_SCTP)
		return SCTP_NS;
	if ((flow->seen | seen) & FLOW_SEEN_RST)
		return TCP_RESET_NS;
	if (flow->seen & seen & FLOW_SEEN_FIN)
		return TCP_CLOSED_NS;
	if (table != ANSWERED)
		return OPENING_NS;
	return (flow->seen | seen) & FLOW_SEEN_FIN ? set->tcp_closing_ns : set->tcp_timeout_ns;
}

static __always_inline bool is_expired(const struct settings *set, u8 protocol,
				       enum flow_table table, const struct flow *flow,
				       const struct flow *other, u64 now)
{
	return idle_ns(flow, other, now) >= timeout_of(set, protocol, table, flow, other);
}

/* Whether the service port is no more; its address may be another's by now. */
static __always_inline bool is_gone(u32 id)
{
	u32 index = index_of(id);
	struct port *port = ports.lookup(&index);

	return id && (!port || *(volatile u32 *)&port->id != id);
}

/*
 * Whether a packet of the client's begins something new under the addresses of a flow.
 *
 * What opens a connection that is open here comes from a client that has forgotten it, or from
 * somebody who only says to be that client. So it goes to the backend that has the connection: the
 * one answers the first (RFC 9293 3.10.7.4) and he resets it. Where nobody answers the first, the
 * next one is sent to another.
 */
static __always_inline bool begins_anew(const struct settings *set, const struct packet *pkt,
					enum flow_table table, const struct flow *flow,
					struct flow *other, u64 now)
{
	if (pkt->key.protocol == IPPROTO_UDP) {
		struct backend_address backend = { .port = flow->port };

		/* CT-02 to CT-07, but that no serving backend at all does not keep a flow either. */
		copy_address(backend.address, flow->address);
		return is_expired(set, IPPROTO_UDP, table, flow, other, now) ||
		       (flow->id && !is_member(flow->id, &backend, MEMBER_SERVING));
	}
	if (!opens(pkt))
		return false;
	if (table != ANSWERED)
		return pkt->isn != flow->isn; /* else it is sent again */
	if (!other || is_closed(flow, other) || is_gone(flow->id) ||
	    is_expired(set, pkt->key.protocol, table, flow, other, now))
		return true;
	if (pkt->isn == flow->isn)
		return false; /* late */
	if (other->syn_ns > other->used_ns)
		return now - other->syn_ns >= SYN_AGAIN_NS;
	/* Who has just answered one may leave the next unanswered (Linux: for half a second). */
	if (since(other->used_ns, now) >= SYN_AGAIN_NS)
		other->syn_ns = now;
	return false;
}

static __always_inline struct flow *find_in(enum flow_table table, struct flow_key *key)
{
	return table == ANSWERED ? conntrack.lookup(key) : flows_new.lookup(key);
}

static __always_inline void forget_half(enum flow_table table, struct flow_key *key)
{
	if (table == ANSWERED)
		conntrack.delete(key);
	else
		flows_new.delete(key);
}

static __always_inline void store_half(enum flow_table table, struct flow_key *key,
				       struct flow *flow)
{
	if (table == ANSWERED)
		conntrack.update(key, flow);
	else
		flows_new.update(key, flow);
}

static __always_inline void restore_half(enum flow_table table, struct flow_key *key,
					 struct flow *flow)
{
	if (table == NEW)
		flows_new.insert(key, flow);
	else if (!flows_new.lookup(key)) /* the client may have begun anew */
		conntrack.insert(key, flow);
}

/* First there, then not here: at no time is there no such flow. */
static __always_inline void move_half(struct flow_key *key, struct flow *flow)
{
	if (!conntrack.update(key, flow))
		flows_new.delete(key);
}

/* Puts back what the LRU took. */
static __always_inline void restore_other(struct packet *pkt, enum flow_table table,
					  struct flow *flow, struct flow_key *key, u64 now)
{
	u64 created_ns = flow->created_ns;
	u8 seen = flow->seen;

	flow->used_ns = now;
	flow->created_ns = now;
	flow->syn_ns = 0;
	flow->seen = 0;
	turn_over(&pkt->key, flow, key);
	restore_half(table, key, flow);
	turn_over(key, flow, &pkt->key);
	flow->created_ns = created_ns;
	flow->seen = seen;
}

/* To where answered flows are: the client has spoken after the answer. */
static __always_inline void move(struct packet *pkt, struct flow *flow, struct flow_key *key,
				 const struct flow *other, u64 now)
{
	u8 seen = flow->seen;

	flow->used_ns = other->used_ns;
	flow->seen = other->seen;
	turn_over(&pkt->key, flow, key);
	move_half(key, flow);
	turn_over(key, flow, &pkt->key);
	flow->used_ns = now;
	flow->seen = seen;
	move_half(&pkt->key, flow);
}

/* An answer to others: it is left alone for as long as netfilter would know of it. */
static __always_inline bool use_foreign(const struct settings *set, struct packet *pkt,
					enum flow_table table, struct flow *where,
					struct flow *flow, u64 now)
{
	if (is_expired(set, pkt->key.protocol, table, flow, NULL, now)) {
		forget_half(table, &pkt->key);
		return false;
	}
	note_use(where, flow, now);
	if (table == NEW) {
		flow->used_ns = now;
		move_half(&pkt->key, flow);
	}
	return true;
}

/*
 * A packet of a known flow: notes what it says and returns true. False: the flow is over, it is
 * forgotten, and the packet is as of no flow.
 */
static __always_inline bool use_flow(const struct settings *set, struct packet *pkt,
				     enum flow_table table, struct flow *where, struct flow *flow)
{
	/* A reset that others forged is taken back by the next packet of who is said to send it. */
	u8 seen = (flow->seen & ~FLOW_SEEN_RST) | seen_in(pkt);
	struct flow_key key = {};
	struct flow *other;
	u64 now = coarse_now();
	bool is_time;

	if (flow->kind == FLOW_FOREIGN)
		return use_foreign(set, pkt, table, where, flow, now);
	is_time = note_use(where, flow, now);
	/* TCP may be silent for a day after its third packet: that one must move it. */
	if (is_time || opens(pkt) || (table == NEW && pkt->key.protocol != IPPROTO_UDP)) {
		other_key(&pkt->key, flow, &key);
		other = find_in(table, &key);
		if (other && !is_other(&pkt->key, flow, &key, other))
			other = NULL;
		if (flow->kind == FLOW_FORWARD && begins_anew(set, pkt, table, flow, other, now)) {
			forget_half(table, &pkt->key);
			if (other)
				forget_half(table, &key);
			return false;
		}
		if (!other)
			restore_other(pkt, table, flow, &key, now);
		if (other && table == NEW && flow->kind == FLOW_FORWARD && is_used(other) &&
		    !opens(pkt) && !(seen & FLOW_SEEN_RST)) {
			flow->seen = seen;
			move(pkt, flow, &key, other, now);
		}
	}
	if (seen != flow->seen) {
		flow->seen = seen;
		flow->used_ns = now;
		store_half(table, &pkt->key, flow);
	}
	return true;
}

/* --- new flows --- */

/*
 * Takes a reverse half's key. First there, then a look at where answered ones are: one that moves
 * is in both for a while.
 */
static __always_inline bool take(struct flow_key *key, struct flow *half)
{
	if (flows_new.insert(key, half))
		return false;
	if (!conntrack.lookup(key))
		return true;
	flows_new.delete(key);
	return false;
}

/*
 * Whether there is nothing under `key`, or what is there can go: it is the same, or it is over.
 * Else it is another flow's: of a second frontend of the backend.
 */
static __always_inline bool make_way(const struct settings *set, enum flow_table table,
				     struct flow_key *key, const struct flow *half, u64 now)
{
	struct flow *taken = find_in(table, key), *other;
	struct flow_key other_half = {};

	if (!taken)
		return true;
	if (taken->kind != FLOW_REVERSE || taken->port != half->port ||
	    taken->client_port != half->client_port ||
	    !same_address(taken->address, half->address)) {
		other_key(key, taken, &other_half);
		other = find_in(table, &other_half);
		if (!is_expired(set, key->protocol, table, taken, other, now))
			return false;
	}
	forget_half(table, key);
	return true;
}

/* The client's own port is taken: any other that is free will do, he never sees it. */
static __always_inline bool take_another(struct flow_key *key, struct flow *half)
{
	int i;

	for (i = 0; i < PORT_TRIES; i++) {
		key->target_port =
			bpf_htons(FIRST_PORT + bpf_get_prandom_u32() % (65536 - FIRST_PORT));
		half->check_head = flow_check(key);
		half->check_tail = half->check_head;
		if (take(key, half))
			return true;
	}
	return false;
}

/*
 * Makes both halves of a new flow. `flow` is the forward one but for its check, its times and the
 * client's port, which is another than the client's own where that is taken. False: all are taken.
 */
static __always_inline bool open_flow(const struct settings *set, struct packet *pkt,
				      struct flow *flow)
{
	struct flow_key key = {};
	u64 now = coarse_now();

	flow->client_port = pkt->key.source_port;
	flow->isn = pkt->isn;
	flow->used_ns = now;
	flow->created_ns = now;
	other_key(&pkt->key, flow, &key);
	turn_over(&pkt->key, flow, &key);
	if (!take(&key, flow) && !(make_way(set, ANSWERED, &key, flow, now) &&
				   make_way(set, NEW, &key, flow, now) && take(&key, flow))) {
		if (!take_another(&key, flow))
			return false;
		count(STAT_REPORTED);
	}
	turn_over(&key, flow, &pkt->key);
	return !flows_new.update(&pkt->key, flow);
}

/* UDP has nothing that tells an answer from a question: remember that this one is to be answered. */
static __always_inline void expect_answer(struct packet *pkt)
{
	struct flow_key key;
	struct flow flow, *where;
	enum flow_table table;
	u64 now;

	turn_round(&pkt->key, &key);
	where = find_flow(&key, &flow, &table);
	now = coarse_now();
	if (where) {
		if (flow.kind == FLOW_FOREIGN)
			note_use(where, &flow, now);
		return; /* else it is our own answer, seen twice */
	}
	__builtin_memset(&flow, 0, sizeof(flow));
	flow.check_head = flow_check(&key);
	flow.check_tail = flow.check_head;
	flow.kind = FLOW_FOREIGN;
	flow.used_ns = now;
	flow.created_ns = now;
	if (!flows_new.update(&key, &flow))
		count(STAT_FOREIGN_FLOWS);
}

#endif
