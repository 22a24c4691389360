/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Rewrites a packet's addresses, ports and checksums. Writes the packet, touches no map.
 *
 * Three sums have to follow, and the kernel's helpers know which are there: the checksum in the
 * packet; what a device begins with that is still to fill it in (CHECKSUM_PARTIAL: the sum of the
 * addresses, without the ports); and what a device has summed up, of the whole packet from IP on
 * (CHECKSUM_COMPLETE). Each helper costs as much as a look-up, so there are as few as can be, but
 * they are better than writing directly: a program that does that has every packet unshared, also
 * those that it only looks at.
 */
#ifndef EBPFLB_NAT_H
#define EBPFLB_NAT_H

#include "parse.h"
#include "sctp.h"

/* bcc declares it with 16 bits. */
static s64 (*csum_update)(struct __sk_buff *skb, u32 sum) = (void *)40;

/* What is in a packet now, if a device has summed it up. */
static __always_inline bool put_in(struct __sk_buff *skb, u32 sum)
{
	csum_update(skb, sum);
	return true;
}

static __always_inline bool store(struct __sk_buff *skb, u32 offset, const void *from, u32 length,
				  u64 flags)
{
	return !bpf_skb_store_bytes(skb, offset, (void *)from, length, flags);
}

/* The field of TCP's or UDP's checksum, from where their header begins; 0: there is none. */
static __always_inline u32 checksum_field(const struct packet *pkt)
{
	if (pkt->fragment)
		return 0;
	if (pkt->key.protocol == IPPROTO_TCP)
		return TCP_CHECKSUM;
	if (pkt->key.protocol == IPPROTO_UDP && pkt->l4_checksum)
		return UDP_CHECKSUM;
	return 0;
}

/* Both ports, as they lie in the packet. */
static __always_inline u32 ports_of(const struct flow_key *key)
{
	u16 ports[2] = { key->source_port, key->target_port };
	u32 both;

	__builtin_memcpy(&both, ports, sizeof(both));
	return both;
}

static __always_inline u32 fold(u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* By how much the sum of a packet changes; to be folded. */
static __always_inline u64 difference(const __be32 *before, const __be32 *after)
{
	u64 sum = (u64)(u32)~before[0] + (u32)~before[1] + (u32)~before[2] + (u32)~before[3];

	return sum + after[0] + after[1] + after[2] + after[3];
}

/*
 * Without BPF_F_PSEUDO_HDR the helper mends a checksum that is there, but not the sum of the packet,
 * and leaves one alone that is still to be filled in: so one call does for nearly every packet.
 * (With it, it takes the addresses out of the packet's sum, as is right where IPv4's checksum makes
 * good for them. BPF_F_IPV6 is of 6.16.)
 */
static __always_inline bool mend_checksum(struct __sk_buff *skb, const struct packet *pkt,
					  u32 field, const struct flow_key *after)
{
	/* To UDP zero means that there is no checksum: no sum may come out so. */
	u64 flags = pkt->key.protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	u32 at = pkt->l4_offset + field, addresses, ports, all;
	u16 checksum;

	addresses = fold(difference(pkt->key.source, after->source) +
			 difference(pkt->key.target, after->target));
	ports = ports_of(after) == ports_of(&pkt->key) ?
			0 :
			fold((u64)(u32)~ports_of(&pkt->key) + ports_of(after));
	all = fold((u64)addresses + ports);
	if (all % 0xffff == 0) /* it would not show whether the helper did anything */
		return !bpf_l4_csum_replace(skb, at, 0, addresses, flags | BPF_F_PSEUDO_HDR) &&
		       (!ports || !bpf_l4_csum_replace(skb, at, 0, ports, flags)) &&
		       (!pkt->v6 || put_in(skb, addresses));

	if (bpf_l4_csum_replace(skb, at, 0, all, flags) ||
	    !load(skb, at, &checksum, sizeof(checksum)))
		return false;
	if (checksum != pkt->l4_checksum)
		return pkt->v6 || put_in(skb, ~addresses);
	return !bpf_l4_csum_replace(skb, at, 0, addresses, flags | BPF_F_PSEUDO_HDR);
}

static __always_inline bool store_ports(struct __sk_buff *skb, const struct packet *pkt,
					const struct flow_key *after, u64 flags)
{
	if (pkt->fragment || ports_of(&pkt->key) == ports_of(after))
		return true;
	return store(skb, pkt->l4_offset, &after->source_port, 2 * sizeof(after->source_port),
		     flags);
}

/* RFC 1624, equation 3. */
static __always_inline u16 follow(u16 checksum, __be32 before, __be32 after)
{
	u32 sum = (u16)~checksum;

	sum += (u32)(u16)~before + (u16) ~(before >> 16) + (u16)after + (after >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* IPv4's own checksum makes good for the addresses, so the packet's sum stays as it is. */
static __always_inline bool store_ipv4(struct __sk_buff *skb, const struct packet *pkt,
				       const struct flow_key *after, u64 flags)
{
	struct {
		u16 pad;
		u16 checksum;
		__be32 source;
		__be32 target;
		u32 ports; /* without options they come next */
	} header = { .source = after->source[3],
		     .target = after->target[3],
		     .ports = ports_of(after) };
	u32 at = pkt->l3_offset + __builtin_offsetof(struct ipv4_header, checksum);

	header.checksum = follow(pkt->ip_checksum, pkt->key.source[3], header.source);
	header.checksum = follow(header.checksum, pkt->key.target[3], header.target);
	if (!pkt->fragment && pkt->l4_offset == pkt->l3_offset + sizeof(struct ipv4_header))
		return store(skb, at, &header.checksum, 14, flags);
	return store(skb, at, &header.checksum, 10, flags) && store_ports(skb, pkt, after, flags);
}

static __always_inline bool store_ipv6(struct __sk_buff *skb, const struct packet *pkt,
				       const struct flow_key *after, u64 flags)
{
	u32 at = pkt->l3_offset + __builtin_offsetof(struct ipv6_header, source);

	if (!pkt->fragment && pkt->l4_offset == pkt->l3_offset + sizeof(struct ipv6_header))
		return store(skb, at, after, 36, flags); /* as they lie in the packet */
	return store(skb, at, after, 32, flags) && store_ports(skb, pkt, after, flags);
}

/*
 * Gives a packet another source, or another target, and these ports. False: the kernel does not let
 * us, and the packet must not go on: it may be half written.
 */
static __always_inline bool rewrite(struct __sk_buff *skb, const struct packet *pkt, bool source,
				    const __be32 *address, __be16 source_port, __be16 target_port)
{
	u32 field = checksum_field(pkt);
	u64 flags = field ? 0 : BPF_F_RECOMPUTE_CSUM; /* nothing makes good for the ports */
	struct flow_key after = pkt->key;

	if (source)
		copy_address(after.source, address);
	else
		copy_address(after.target, address);
	after.source_port = source_port;
	after.target_port = target_port;

	if (field && !mend_checksum(skb, pkt, field, &after))
		return false;
	if (pkt->v6 ? !store_ipv6(skb, pkt, &after, flags) : !store_ipv4(skb, pkt, &after, flags))
		return false;
	if (pkt->key.protocol != IPPROTO_SCTP || ports_of(&pkt->key) == ports_of(&after))
		return true;
	return sctp_mend_crc(skb, pkt, pkt->key.source_port, source_port, pkt->key.target_port,
			     target_port) >= 0;
}

#endif
