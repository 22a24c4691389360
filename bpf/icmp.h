/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP of Services: errors about packets that we translated, and echo requests. The only header that
 * touches both, the maps and the packet: what it looks up stands in the middle of what it writes.
 *
 * An error quotes the beginning of a packet as it looked where it did not get on, which is beyond
 * us. Whom the error is for has sent it with other addresses and ports, so these are put back. The
 * packet that would answer the quoted one finds the flow:
 *
 *	egress   {client -> backend} is quoted, {backend -> client} is the flow's reverse half
 *	ingress  {frontend -> client} is quoted, {client -> frontend} is its forward half
 *
 * What is stored within the message is made good for by its own checksum, so that every sum that the
 * kernel has of the packet stays right, also one that a device is still to fill in.
 */
#ifndef EBPFLB_ICMP_H
#define EBPFLB_ICMP_H

#include "flow.h"
#include "lookup.h"
#include "nat.h"
#include "parse.h"

/* What does not concern a Service goes on as it came. */
#define ICMP_NOT_OURS TC_ACT_UNSPEC

#define ICMP_CHECKSUM 2
#define ICMP_TTL 64

/* Types of RFC 792 and RFC 4443; those of ICMPv6's errors are 1 to 4. */
#define ICMP_ECHO_REPLY 0
#define ICMP_UNREACHABLE 3
#define ICMP_SOURCE_QUENCH 4
#define ICMP_ECHO_REQUEST 8
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER_PROBLEM 12
#define ICMPV6_UNREACHABLE 1
#define ICMPV6_PARAMETER_PROBLEM 4
#define ICMPV6_ECHO_REQUEST 128
#define ICMPV6_ECHO_REPLY 129

/* For whom the kernel takes a frame to be (linux/if_packet.h). */
#define PACKET_HOST 0
#define PACKET_OTHERHOST 3

/* --- errors: what they quote --- */

static __always_inline bool is_error(const struct packet *pkt)
{
	u8 type = pkt->icmp_type;

	if (pkt->v6)
		return type >= ICMPV6_UNREACHABLE && type <= ICMPV6_PARAMETER_PROBLEM;
	return type == ICMP_UNREACHABLE || type == ICMP_SOURCE_QUENCH ||
	       type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETER_PROBLEM;
}

static __always_inline bool read_quoted_ipv4(struct __sk_buff *skb, struct packet *quoted)
{
	struct ipv4_header ip;
	u32 header;

	if (bpf_skb_load_bytes(skb, quoted->l3_offset, &ip, sizeof(ip)))
		return false;
	header = (ip.version_length & 0x0f) * 4;
	if (ip.version_length >> 4 != 4 || header < sizeof(ip) ||
	    ip.fragment & bpf_htons(IPV4_OFFSET))
		return false;
	map_ipv4(quoted->key.source, ip.source);
	map_ipv4(quoted->key.target, ip.target);
	quoted->key.protocol = ip.protocol;
	quoted->ip_checksum = ip.checksum;
	quoted->l4_offset = quoted->l3_offset + header;
	return true;
}

static __always_inline bool read_quoted_ipv6(struct __sk_buff *skb, struct packet *quoted)
{
	struct ipv6_header ip;
	struct ipv6_extension extension;
	u32 offset = quoted->l3_offset + sizeof(ip);
	u8 next;
	int i;

	if (bpf_skb_load_bytes(skb, quoted->l3_offset, &ip, sizeof(ip)) ||
	    bpf_ntohl(ip.version_flow) >> 28 != 6)
		return false;
	next = ip.next;
	for (i = 0; i < IPV6_EXTENSIONS; i++) {
		if (next != IPV6_HOP_BY_HOP && next != IPV6_ROUTING && next != IPV6_FRAGMENT &&
		    next != IPV6_OPTIONS)
			break;
		if (bpf_skb_load_bytes(skb, offset, &extension, sizeof(extension)))
			return false;
		if ((next == IPV6_FRAGMENT && extension.fragment & bpf_htons(IPV6_OFFSET)) ||
		    (next == IPV6_ROUTING && extension.segments_left))
			return false;
		offset += next == IPV6_FRAGMENT ? 8 : (extension.length + 1) * 8;
		next = extension.next;
	}
	__builtin_memcpy(quoted->key.source, ip.source, sizeof(ip.source));
	__builtin_memcpy(quoted->key.target, ip.target, sizeof(ip.target));
	quoted->key.protocol = next;
	quoted->l4_offset = offset;
	return true;
}

/*
 * Reads what an error quotes, as if it were a packet of its own. False: it is not whole enough, or
 * no packet of whom the error is for, or of no protocol of ours.
 */
static __always_inline bool read_quoted(struct __sk_buff *skb, const struct packet *pkt,
					struct packet *quoted)
{
	u32 end = pkt->l4_offset + pkt->l4_length;
	struct l4_header l4;
	u8 protocol;

	quoted->v6 = pkt->v6;
	quoted->l3_offset = pkt->l4_offset + ICMP_LENGTH;
	if (pkt->v6 ? !read_quoted_ipv6(skb, quoted) : !read_quoted_ipv4(skb, quoted))
		return false;
	protocol = quoted->key.protocol;
	if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP && protocol != IPPROTO_SCTP)
		return false;
	if (!same_address(quoted->key.source, pkt->key.target))
		return false;
	if (quoted->l4_offset + sizeof(l4) > end ||
	    bpf_skb_load_bytes(skb, quoted->l4_offset, &l4, sizeof(l4)))
		return false;
	quoted->l4_length = end - quoted->l4_offset;
	quoted->key.source_port = l4.source_port;
	quoted->key.target_port = l4.target_port;
	return true;
}

/* --- errors: what is put back --- */

/* IPv4's checksum makes good for its addresses; for those of IPv6 `flags` tell what does. */
static __always_inline bool store_address(struct __sk_buff *skb, const struct packet *of,
					  bool source, const __be32 *address, u64 flags)
{
	const __be32 *before = source ? of->key.source : of->key.target;
	u32 at = of->l3_offset;

	if (of->v6) {
		at += source ? __builtin_offsetof(struct ipv6_header, source) :
			       __builtin_offsetof(struct ipv6_header, target);
		return store(skb, at, address, 4 * sizeof(*address), flags);
	}
	at += __builtin_offsetof(struct ipv4_header, checksum);
	if (bpf_l3_csum_replace(skb, at, before[3], address[3], sizeof(*address)))
		return false;
	at += sizeof(u16) + (source ? 0 : sizeof(*address));
	return store(skb, at, &address[3], sizeof(*address), 0);
}

/* By how much the sum of what is around it changes. */
static __always_inline u32 change_of_address(const struct packet *of, bool source,
					     const __be32 *address)
{
	const __be32 *before = source ? of->key.source : of->key.target;

	return bpf_csum_diff((__be32 *)before, 4 * sizeof(*address), (__be32 *)address,
			     4 * sizeof(*address), 0);
}

/* The checksum in what is quoted, if it is there. Returns by how much it changes. */
static __always_inline u32 mend_quoted_checksum(struct __sk_buff *skb, const struct packet *quoted,
						u32 of_address, u32 of_ports)
{
	bool is_udp = quoted->key.protocol == IPPROTO_UDP;
	u32 field = is_udp ? UDP_CHECKSUM : TCP_CHECKSUM;
	u16 before, after;

	if (quoted->key.protocol == IPPROTO_SCTP || field + sizeof(before) > quoted->l4_length)
		return 0;
	field += quoted->l4_offset;
	if (bpf_skb_load_bytes(skb, field, &before, sizeof(before)) || (is_udp && !before))
		return 0; /* to UDP zero is none */
	after = follow(before, ~of_address, of_ports);
	if (is_udp && !after)
		after = 0xffff;
	return store(skb, field, &after, sizeof(after), 0) ? (u16)~before + (u32)after : 0;
}

/* Gives what is quoted another source or target, and these ports, and the error its checksum. */
static __always_inline bool mend_quoted(struct __sk_buff *skb, const struct packet *pkt,
					const struct packet *quoted, bool source,
					const __be32 *address, u32 ports)
{
	u32 of_address = change_of_address(quoted, source, address);
	u32 of_ports = fold((u64)(u32)~ports_of(&quoted->key) + ports);
	u64 change = of_ports;

	change += mend_quoted_checksum(skb, quoted, of_address, of_ports);
	if (quoted->v6) /* that of IPv4 makes good for them */
		change += of_address;
	return store_address(skb, quoted, source, address, 0) &&
	       store(skb, quoted->l4_offset, &ports, sizeof(ports), 0) &&
	       !bpf_l4_csum_replace(skb, pkt->l4_offset + ICMP_CHECKSUM, 0, fold(change), 0);
}

/* Gives the error itself another source or target. */
static __always_inline bool mend_error(struct __sk_buff *skb, const struct packet *pkt, bool source,
				       const __be32 *address)
{
	/* The helper takes the change out of the packet's sum (BPF_F_IPV6 is of 6.16). */
	if (pkt->v6 &&
	    bpf_l4_csum_replace(skb, pkt->l4_offset + ICMP_CHECKSUM, 0,
				change_of_address(pkt, source, address), BPF_F_PSEUDO_HDR))
		return false;
	return store_address(skb, pkt, source, address, BPF_F_RECOMPUTE_CSUM);
}

static __always_inline bool put_back(struct __sk_buff *skb, const struct packet *pkt,
				     const struct packet *quoted, const struct flow *flow)
{
	bool forward = flow->kind == FLOW_FORWARD;
	struct flow_key after;

	after.source_port = forward ? flow->port : flow->client_port;
	after.target_port = forward ? flow->client_port : flow->port;
	if (!mend_quoted(skb, pkt, quoted, forward, flow->address, ports_of(&after)))
		return false;
	if (forward)
		return mend_error(skb, pkt, false, flow->address);
	/* It may be of a router on the way: that has an address of its own. */
	return !same_address(pkt->key.source, quoted->key.target) ||
	       mend_error(skb, pkt, true, flow->address);
}

/*
 * Finds the flow of what is quoted, if it is mended at this hook. Of the host's own flows only what
 * comes in is: what it says itself about an answer would have to be sent to where it does not go.
 */
static __always_inline bool find_quoted(const struct packet *quoted, bool egress, struct flow *flow)
{
	struct flow_key answer;
	enum flow_table table;

	turn_round(&quoted->key, &answer);
	if (!find_flow(&answer, flow, &table) || !is_for_hook(flow, egress))
		return false;
	return flow->kind == FLOW_REVERSE ||
	       (flow->kind == FLOW_FORWARD && !(flow->flags & FLOW_HOST));
}

static __always_inline int icmp_error(struct __sk_buff *skb, const struct packet *pkt, bool egress)
{
	const struct settings *set = node_settings();
	struct packet quoted = {};
	struct flow flow;

	/* None is so long as to be sent in fragments (RFC 1812 4.3.2.3, RFC 4443 2.4). */
	if (!set || !is_error(pkt) || pkt->more || !read_quoted(skb, pkt, &quoted) ||
	    !find_quoted(&quoted, egress, &flow))
		return ICMP_NOT_OURS;
	/*
	 * Somebody on the way to the backend of a connection that its client has forgotten. It would
	 * end what the client asks for now, whose next SYN goes to another backend (begins_anew()).
	 */
	if (flow.kind == FLOW_REVERSE && flow.syn_ns > flow.used_ns) {
		count(STAT_ICMP_ERRORS);
		return TC_ACT_SHOT;
	}
	if (!put_back(skb, pkt, &quoted, &flow)) {
		count(STAT_DROPPED_UNWRITABLE);
		return TC_ACT_SHOT;
	}
	count(STAT_ICMP_ERRORS);
	if (flow.kind == FLOW_FORWARD && flow.flags & FLOW_MASQUERADE)
		skb->mark |= set->masquerade_mark;
	return TC_ACT_UNSPEC;
}

static __always_inline int icmp_error_ingress(struct __sk_buff *skb, const struct packet *pkt)
{
	return icmp_error(skb, pkt, false);
}

static __always_inline int icmp_error_egress(struct __sk_buff *skb, const struct packet *pkt)
{
	return icmp_error(skb, pkt, true);
}

/* --- echo --- */

/*
 * Whether what came in is for this node: a network floods what it does not know, and others answer
 * for it. What a bridge's port gets is for the bridge; without an Ethernet header there is nobody
 * else.
 */
static __always_inline bool is_for_node(const struct __sk_buff *skb, const struct packet *pkt)
{
	struct device_key key = { .index = skb->ifindex, .role = DEVICE_BRIDGED };

	return !pkt->l3_offset || skb->pkt_type == PACKET_HOST ||
	       (skb->pkt_type == PACKET_OTHERHOST && devices.lookup(&key));
}

/*
 * Whether it asks a Service's address that answers. Not if it has options or extension headers:
 * they may ask for more than that.
 */
static __always_inline bool is_echo_request(struct __sk_buff *skb, const struct packet *pkt,
					    bool egress)
{
	const struct settings *set = node_settings();
	struct service_address_key key = { .role = ADDRESS_ANSWERS };
	u32 header = pkt->v6 ? sizeof(struct ipv6_header) : sizeof(struct ipv4_header);

	if (pkt->icmp_type != (pkt->v6 ? ICMPV6_ECHO_REQUEST : ICMP_ECHO_REQUEST) || pkt->more ||
	    pkt->l4_offset != pkt->l3_offset + header)
		return false;
	if (!set || !(set->state & STATE_PING))
		return false;
	if (egress ? skb->ingress_ifindex : !is_for_node(skb, pkt))
		return false;
	copy_address(key.address, pkt->key.target);
	return service_addrs.lookup(&key) != NULL;
}

/* The sum of the addresses is the same in either order. */
static __always_inline bool swap_ipv4(struct __sk_buff *skb, const struct packet *pkt)
{
	struct ipv4_header ip;

	if (bpf_skb_load_bytes(skb, pkt->l3_offset, &ip, sizeof(ip)))
		return false;
	ip.checksum = follow(ip.checksum, bpf_htonl((u32)ip.ttl << 24), bpf_htonl(ICMP_TTL << 24));
	ip.ttl = ICMP_TTL;
	ip.source = pkt->key.target[3];
	ip.target = pkt->key.source[3];
	return store(skb, pkt->l3_offset, &ip, sizeof(ip), 0);
}

static __always_inline bool swap_ipv6(struct __sk_buff *skb, const struct packet *pkt)
{
	struct ipv6_header ip;

	if (bpf_skb_load_bytes(skb, pkt->l3_offset, &ip, sizeof(ip)))
		return false;
	ip.hop_limit = ICMP_TTL;
	__builtin_memcpy(ip.source, pkt->key.target, sizeof(ip.source));
	__builtin_memcpy(ip.target, pkt->key.source, sizeof(ip.target));
	return store(skb, pkt->l3_offset, &ip, sizeof(ip), BPF_F_RECOMPUTE_CSUM);
}

static __always_inline bool swap_ethernet(struct __sk_buff *skb)
{
	struct {
		u16 target[3];
		u16 source[3];
	} was, now;

	if (bpf_skb_load_bytes(skb, 0, &was, sizeof(was)))
		return false;
	__builtin_memcpy(now.target, was.source, sizeof(now.target));
	__builtin_memcpy(now.source, was.target, sizeof(now.source));
	return store(skb, 0, &now, sizeof(now), 0);
}

/* Makes of a request the reply to it. */
static __always_inline bool turn_into_reply(struct __sk_buff *skb, const struct packet *pkt)
{
	u8 reply = pkt->v6 ? ICMPV6_ECHO_REPLY : ICMP_ECHO_REPLY;
	u32 at = pkt->l4_offset + ICMP_CHECKSUM;

	if (bpf_l4_csum_replace(skb, at, bpf_htons(pkt->icmp_type << 8), bpf_htons(reply << 8),
				sizeof(u16)) ||
	    !store(skb, pkt->l4_offset, &reply, sizeof(reply), 0))
		return false;
	if (pkt->v6 ? !swap_ipv6(skb, pkt) : !swap_ipv4(skb, pkt))
		return false;
	return !pkt->l3_offset || swap_ethernet(skb);
}

static __always_inline int icmp_echo(struct __sk_buff *skb, const struct packet *pkt, bool egress)
{
	if (!is_echo_request(skb, pkt, egress))
		return ICMP_NOT_OURS;
	if (!turn_into_reply(skb, pkt)) {
		count(STAT_DROPPED_UNWRITABLE);
		return TC_ACT_SHOT;
	}
	count(STAT_PINGS);
	return bpf_redirect(skb->ifindex, egress ? BPF_F_INGRESS : 0);
}

#endif
