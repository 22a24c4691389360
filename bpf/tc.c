// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The packet programs, for all that no socket program saw: they run where a device receives and
 * where it sends, on uplinks and on the pods' devices.
 *
 * A packet to a Service is given its backend where it comes in from the client's side, and the
 * answer its Service where it goes out there, so that all behind us (netfilter, routing, policies)
 * sees one and the same pair of addresses both ways. What this node itself sends past the socket
 * programs is the mirror image: it is past routing when it is seen, so it is sent on by
 * ourselves. Whatever is not ours goes on to the programs behind us, untouched.
 */
#include "lookup.h"
#include "parse.h"
#include "flow.h"
#include "fragment.h"
#include "nat.h"
#include "icmp.h"

#define AF_INET 2
#define AF_INET6 10

/* Some bcc declares it without the length, as no kernel that was released has it. */
static long (*redirect_neigh)(u32 index, void *parameters, int length, u64 flags) = (void *)152;

/* No action of the kernel's: it is a packet of the flow that was found. */
#define TRANSLATE (-2)

/* The one exit for drops. */
static __always_inline int drop(u32 reason)
{
	count(reason);
	return TC_ACT_SHOT;
}

static __always_inline bool is_device(u32 index, u32 role)
{
	struct device_key key = { .index = index, .role = role };

	return devices.lookup(&key) != NULL;
}

/* --- who dials --- */

static __always_inline bool is_in_subnet(const __be32 *address, const struct subnet *subnet)
{
	return (address[0] & subnet->mask[0]) == subnet->address[0] &&
	       (address[1] & subnet->mask[1]) == subnet->address[1] &&
	       (address[2] & subnet->mask[2]) == subnet->address[2] &&
	       (address[3] & subnet->mask[3]) == subnet->address[3];
}

/* Whether it comes from a pod, as the local-traffic detector tells them (MASQ-09). */
static __always_inline bool is_from_pod(const struct __sk_buff *skb, const struct settings *set,
					const struct packet *pkt)
{
	if (set->flags & (pkt->v6 ? SETTING_PODS_BY_NET6 : SETTING_PODS_BY_NET4))
		return is_in_subnet(pkt->key.source, pkt->v6 ? &set->pods6 : &set->pods4);
	return set->flags & SETTING_PODS_BY_DEVICE && is_device(skb->ifindex, DEVICE_POD);
}

/* Whether the backend is to see this node's address, as TV-M has it row by row. */
static __always_inline bool is_masqueraded(const struct __sk_buff *skb, const struct settings *set,
					   const struct packet *pkt, u32 scope, bool from_pod,
					   const struct choice *chosen)
{
	bool is_local = chosen->flags & BACKEND_LOCAL;

	if (same_address(pkt->key.source, chosen->to.address))
		return true; /* a hairpin (MASQ-06): it would answer itself */
	if (is_local &&
	    set->state & (pkt->v6 ? STATE_MASQUERADE_BRIDGED6 : STATE_MASQUERADE_BRIDGED4) &&
	    is_device(skb->ifindex, DEVICE_BRIDGED))
		return true; /* its answer would be switched, past netfilter */
	if (scope == SCOPE_INTERNAL)
		return set->flags & SETTING_MASQUERADE_ALL ||
		       (!from_pod &&
			set->flags & (pkt->v6 ? SETTING_TELLS_PODS6 : SETTING_TELLS_PODS4));
	if (chosen->port_flags & PORT_EXTERNAL_LOCAL)
		return false;
	return !(is_local && set->state & STATE_KEEP_CLIENT);
}

/* --- what becomes of a packet --- */

/* The device that leads to a backend from here; 0 where none does, or this node is it itself. */
static __always_inline u32 route_to(struct __sk_buff *skb, const struct packet *pkt,
				    const __be32 *backend)
{
	struct bpf_fib_lookup fib = {};
	int result;

	fib.ifindex = skb->ifindex;
	if (pkt->v6) {
		fib.family = AF_INET6;
		copy_address(fib.ipv6_src, pkt->key.source);
		copy_address(fib.ipv6_dst, backend);
	} else {
		fib.family = AF_INET;
		fib.ipv4_src = pkt->key.source[3];
		fib.ipv4_dst = backend[3];
	}
	fib.l4_protocol = pkt->key.protocol;
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return 0;
	return fib.ifindex;
}

static __always_inline int translate(struct __sk_buff *skb, const struct settings *set,
				     const struct packet *pkt, const struct flow *flow)
{
	bool forward = flow->kind == FLOW_FORWARD;
	u32 device = 0;

	if (flow->kind == FLOW_FOREIGN)
		return TC_ACT_UNSPEC;
	if (forward && flow->flags & FLOW_HOST) {
		device = route_to(skb, pkt, flow->address);
		if (!device)
			return TC_ACT_UNSPEC;
	}
	if (is_head(pkt))
		note_head(pkt);
	if (!rewrite(skb, pkt, !forward, flow->address, forward ? flow->client_port : flow->port,
		     forward ? flow->port : flow->client_port))
		return drop(STAT_DROPPED_UNWRITABLE);
	if (forward && flow->flags & FLOW_MASQUERADE)
		skb->mark |= set->masquerade_mark;
	return device ? redirect_neigh(device, NULL, 0, 0) : TC_ACT_UNSPEC;
}

/* Netfilter answers a packet with this mark, and gets the ICMP right whatever the packet is. */
static __always_inline int reject(struct __sk_buff *skb, const struct settings *set, bool egress)
{
	if (egress)
		return drop(STAT_REJECTED); /* netfilter is behind us */
	count(STAT_REJECTED);
	skb->mark |= set->reject_mark;
	return TC_ACT_UNSPEC;
}

static __always_inline int refuse(struct __sk_buff *skb, const struct settings *set,
				  enum verdict verdict, bool egress)
{
	switch (verdict) {
	case REJECT:
		return reject(skb, set, egress);
	case REJECT_POLICY:
		return drop(STAT_DROPPED_POLICY);
	case REJECT_RANGE:
		return drop(STAT_DROPPED_RANGE);
	case REJECT_FOREIGN:
		return drop(STAT_DROPPED_FOREIGN);
	default:
		return TC_ACT_UNSPEC;
	}
}

/* The agent's own: one that leaves comes back in, so that one packet proves both hooks. */
static __always_inline int note_probe(struct __sk_buff *skb, const struct packet *pkt, bool egress)
{
	u32 hook = egress ? HOOK_EGRESS : HOOK_INGRESS;
	struct probe *seen = probe.lookup(&hook);
	u64 number = 0;

	if (!seen || !load(skb, pkt->l4_offset + UDP_LENGTH, &number, sizeof(number)))
		return TC_ACT_SHOT;
	if (!number || seen->expected != number)
		return TC_ACT_SHOT;
	seen->netns = skb->ifindex;
	seen->socket = number;
	__sync_fetch_and_add(&seen->runs, 1);
	return egress ? bpf_redirect(skb->ifindex, BPF_F_INGRESS) : TC_ACT_SHOT;
}

static __always_inline struct frontend_value *find_frontend(const struct packet *pkt)
{
	struct frontend_key dialled = {};
	struct frontend_value *found;

	if (is_unspecified(pkt->key.target))
		return NULL; /* nobody's address, but it stands for any in the map */
	copy_address(dialled.address, pkt->key.target);
	dialled.port = pkt->key.target_port;
	dialled.protocol = pkt->key.protocol;
	found = frontends.lookup(&dialled);
	if (found || !has_node_ports(dialled.address))
		return found;
	return find_node_port(&dialled);
}

/* Whether its answer would be taken for one of a flow's, which is then in `flow`. */
static __always_inline bool is_answered_by_flow(const struct packet *pkt, struct flow *flow)
{
	struct flow_key answer;
	enum flow_table table;

	turn_round(&pkt->key, &answer);
	return find_flow(&answer, flow, &table) && flow->kind == FLOW_REVERSE;
}

static __always_inline bool is_service_address(const __be32 *address)
{
	struct service_address_key key = { .role = ADDRESS_KNOWN };

	copy_address(key.address, address);
	return service_addrs.lookup(&key) != NULL;
}

/* Not ours, though it may be to an address of ours: then so are the fragments that follow. */
static __always_inline int pass(const struct packet *pkt)
{
	if (!is_head(pkt))
		return TC_ACT_UNSPEC;
	if (is_service_address(pkt->key.target))
		note_head(pkt);
	else
		forget_head(pkt); /* its number was another's before */
	return TC_ACT_UNSPEC;
}

/* A fragment whose head did not pass: to a Service it came before that. */
static __always_inline int miss_head(const struct packet *pkt)
{
	return is_service_address(pkt->key.target) ? drop(STAT_DROPPED_FRAGMENT) : TC_ACT_UNSPEC;
}

/* Whom a packet goes to that begins a flow; UNTOUCHED: that is no concern of ours. */
static __always_inline enum verdict choose_for(struct __sk_buff *skb, const struct settings *set,
					       const struct packet *pkt,
					       const struct frontend_value *frontend, bool egress,
					       struct flow *flow)
{
	struct client client = { .path = PATH_PACKET, .host = egress };
	struct choice chosen = {};
	enum verdict verdict;

	client.pod = !egress && is_from_pod(skb, set, pkt);
	__builtin_memcpy(client.who, pkt->key.source, sizeof(client.who));
	verdict = choose(frontend, &client, &chosen);
	if (verdict != FORWARD)
		return verdict;
	flow->scope = frontend->scope;
	flow->frontend_kind = frontend->kind;
	flow->id = frontend->id;
	copy_address(flow->address, chosen.to.address);
	flow->port = chosen.to.port;
	if (egress)
		flow->flags = FLOW_HOST;
	else if (is_masqueraded(skb, set, pkt, frontend->scope, client.pod, &chosen))
		flow->flags = FLOW_MASQUERADE;
	count_connection(frontend->id);
	return FORWARD;
}

/* A packet that begins a flow, if it is one to a Service. */
static __always_inline int begin(struct __sk_buff *skb, const struct settings *set,
				 struct packet *pkt, struct flow *flow, bool egress)
{
	struct frontend_value *found = find_frontend(pkt), frontend = {};
	enum verdict verdict;
	bool is_again;

	if (found)
		frontend = *found;
	if (frontend.kind == KIND_PROBE)
		return note_probe(skb, pkt, egress);
	if (found && is_mid_flow(pkt)) /* and migrating */
		return drop(STAT_DROPPED_MIGRATING);
	if ((egress && !(found && is_device(skb->ifindex, DEVICE_UPLINK))) || is_mid_flow(pkt) ||
	    set->state & STATE_DRAINING)
		return pass(pkt);
	/*
	 * What we have translated looks as if its client dialled the backend. It comes again where
	 * devices are stacked, or is sent on by us: but never in on the device that it came from.
	 */
	is_again = is_answered_by_flow(pkt, flow);
	if (is_again ? egress || flow->device != skb->ifindex : !found)
		return pass(pkt);

	__builtin_memset(flow, 0, sizeof(*flow));
	flow->kind = FLOW_FORWARD;
	flow->device = skb->ifindex;
	if (found) {
		verdict = choose_for(skb, set, pkt, &frontend, egress, flow);
		if (verdict != FORWARD)
			return refuse(skb, set, verdict, egress);
	} else { /* to the backend itself: a flow of its own keeps them apart */
		copy_address(flow->address, pkt->key.target);
		flow->port = pkt->key.target_port;
	}
	return open_flow(set, pkt, flow) ? TRANSLATE : drop(STAT_DROPPED_PORTS);
}

/* Whether it leaves from where a NodePort is, and the answer would be taken for a new flow. */
static __always_inline bool leaves_node_port(const struct packet *pkt)
{
	struct frontend_key from = {};

	if (is_mid_flow(pkt) || !has_node_ports(pkt->key.source))
		return false;
	copy_address(from.address, pkt->key.source);
	from.port = pkt->key.source_port;
	from.protocol = pkt->key.protocol;
	return find_node_port(&from) != NULL;
}

/* A packet of no flow that we know. */
static __always_inline int meet(struct __sk_buff *skb, const struct settings *set,
				struct packet *pkt, struct flow *flow, bool egress)
{
	if (is_mid_flow(pkt) && !(set->state & STATE_MIGRATING))
		return pass(pkt);
	if (!egress)
		return begin(skb, set, pkt, flow, egress);
	if (pkt->key.protocol != IPPROTO_TCP && leaves_node_port(pkt))
		expect_answer(pkt);
	return skb->ingress_ifindex ? pass(pkt) : begin(skb, set, pkt, flow, egress);
}

static __always_inline int on_icmp(struct __sk_buff *skb, struct packet *pkt, bool egress)
{
	int action = egress ? icmp_error_egress(skb, pkt) : icmp_error_ingress(skb, pkt);

	return action != ICMP_NOT_OURS ? action : icmp_echo(skb, pkt, egress);
}

static __always_inline int on_flow(struct __sk_buff *skb, const struct settings *set,
				   struct packet *pkt, bool egress)
{
	struct flow flow, *where;
	enum flow_table table;
	int action;

	where = find_flow(&pkt->key, &flow, &table);
	if (!where || !is_for_hook(&flow, egress) || !use_flow(set, pkt, table, where, &flow)) {
		action = meet(skb, set, pkt, &flow, egress);
		if (action != TRANSLATE)
			return action;
	}
	return translate(skb, set, pkt, &flow);
}

static __always_inline int serve(struct __sk_buff *skb, u32 l3_offset, bool egress)
{
	const struct settings *set = node_settings();
	struct packet pkt = {};

	if (!set || !parse(skb, l3_offset, &pkt))
		return TC_ACT_UNSPEC;
	if (is_icmp(&pkt))
		return on_icmp(skb, &pkt, egress);
	if (pkt.fragment && !recall_ports(&pkt))
		return miss_head(&pkt);
	return on_flow(skb, set, &pkt, egress);
}

int ebpflb_ingress(struct __sk_buff *skb)
{
	return serve(skb, ETHERNET_LENGTH, false);
}

int ebpflb_egress(struct __sk_buff *skb)
{
	return serve(skb, ETHERNET_LENGTH, true);
}

/* Few nodes have a device without an Ethernet header, and all of it is compiled twice for them. */
#if WITH_L3
int ebpflb_in_l3(struct __sk_buff *skb)
{
	return serve(skb, 0, false);
}

int ebpflb_out_l3(struct __sk_buff *skb)
{
	return serve(skb, 0, true);
}
#endif
