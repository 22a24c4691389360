/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From a packet to what is asked of the maps: its addresses and ports in the one form, and what it
 * says of its flow. Reads the packet, never writes it, and touches no map.
 *
 * Nothing is assumed of where the kernel keeps the bytes (a header may lie outside of the linear
 * part), so they are copied. What is not understood, or not whole, is not ours.
 */
#ifndef EBPFLB_PARSE_H
#define EBPFLB_PARSE_H

#include "abi.h"

/* What a program may return (linux/pkt_cls.h). */
#define TC_ACT_UNSPEC (-1) /* on to the next program */
#define TC_ACT_SHOT 2

#define IPPROTO_ICMP 1
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_ICMPV6 58
#define IPPROTO_SCTP 132

#define ETHERNET_LENGTH 14
#define ETHERTYPE_IPV4 0x0800
#define ETHERTYPE_IPV6 0x86dd
#define VLAN_ID 0x0fff

/* The headers of RFC 791, 8200, 9293, 768 and 9260, as far as they are read. */
struct ipv4_header {
	u8 version_length; /* 4 bits each, the length in words */
	u8 tos;
	__be16 length;
	__be16 id;
	__be16 fragment; /* 3 bits of flags, the offset in 8 bytes */
	u8 ttl;
	u8 protocol;
	u16 checksum;
	__be32 source;
	__be32 target;
};

struct ipv6_header {
	__be32 version_flow;
	__be16 length; /* of what follows */
	u8 next;
	u8 hop_limit;
	__be32 source[4];
	__be32 target[4];
};

/* The first bytes of every extension header; a fragment's is whole. */
struct ipv6_extension {
	u8 next;
	u8 length; /* in 8 bytes, without the first 8 */
	union {
		__be16 fragment; /* the offset in the upper 13 bits, then the flag of more */
		struct {
			u8 routing_type;
			u8 segments_left;
		};
	};
	__be32 id;
};

#define IPV4_MORE 0x2000
#define IPV4_OFFSET 0x1fff
#define IPV6_MORE 0x0001
#define IPV6_OFFSET 0xfff8

#define IPV6_HOP_BY_HOP 0
#define IPV6_ROUTING 43
#define IPV6_FRAGMENT 44
#define IPV6_AUTHENTICATION 51
#define IPV6_OPTIONS 60
/* RFC 8200 has four before a transport header, of which one may come twice. */
#define IPV6_EXTENSIONS 6

/* What TCP, UDP and SCTP begin with. */
struct l4_header {
	__be16 source_port;
	__be16 target_port;
	union {
		__be32 number; /* TCP's sequence number, SCTP's verification tag */
		struct {
			__be16 udp_length;
			u16 udp_checksum;
		};
	};
};

#define ICMP_LENGTH 8
#define UDP_LENGTH 8
#define UDP_CHECKSUM 6
#define TCP_LENGTH 20
#define TCP_CHECKSUM 16

/* TCP's fourth and fifth word. */
struct tcp_state {
	u8 offset;
	u8 flags;
	__be16 window;
	u16 checksum;
	__be16 urgent;
};

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

/* Chunks follow. */
struct sctp_header {
	__be16 source_port;
	__be16 target_port;
	__be32 tag;
	u32 checksum;
};

struct sctp_chunk {
	u8 type;
	u8 flags;
	__be16 length;
};

#define SCTP_INIT 1
#define SCTP_ABORT 6
#define SCTP_SHUTDOWN 7
#define SCTP_SHUTDOWN_ACK 8

/*
 * What is asked of the maps. What follows from it is asked by the functions below and not kept as
 * so many bools: the verifier would go through all that comes after once for each combination.
 */
struct packet {
	struct flow_key key; /* ports of ICMP and of a fragment that is not the first: 0 */
	u16 l3_offset;
	u16 l4_offset;
	u32 l4_length;	    /* bytes from there to the end of the IP packet */
	__be32 isn;	    /* of what opens: TCP's sequence number, SCTP's initiate tag */
	__be32 fragment_id; /* of a fragment, the head too */
	u16 v6;		    /* 0: IPv4 */
	u16 fragment;	    /* where in its datagram it is: not 0 for those without ports */
	u16 more;	    /* not 0: other fragments follow */
	u16 ip_checksum;
	u16 l4_checksum; /* TCP's or UDP's */
	u8 control;	 /* TCP's flags, also for what says the same in SCTP; 0: UDP */
	u8 icmp_type;
};

/* In `control`: there are connections. */
#define CONTROLLED 0x80

/* Whether it is the first of several fragments. */
static __always_inline bool is_head(const struct packet *pkt)
{
	return pkt->more && !pkt->fragment;
}

/* Whether it asks for a connection. */
static __always_inline bool opens(const struct packet *pkt)
{
	return (pkt->control & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

/* Whether something must have come before it. */
static __always_inline bool is_mid_flow(const struct packet *pkt)
{
	return (pkt->control && !opens(pkt)) || pkt->fragment;
}

/* What its sender has sent now (enum flow_seen). */
static __always_inline u8 seen_in(const struct packet *pkt)
{
	return (pkt->control & TCP_FIN ? FLOW_SEEN_FIN : 0) |
	       (pkt->control & TCP_RST ? FLOW_SEEN_RST : 0);
}

static __always_inline bool is_icmp(const struct packet *pkt)
{
	return pkt->key.protocol == (pkt->v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP);
}

/* Most headers lie in the linear part; the helper that reaches all costs as much as a look-up. */
static __always_inline bool load(struct __sk_buff *skb, u32 offset, void *to, u32 length)
{
	/* For the verifier: what is compared is the very number that is added. */
	asm volatile("" : "+r"(offset));
	if (offset <= 0x7fff) {
		void *from = (void *)(long)skb->data + offset;

		if (from + length <= (void *)(long)skb->data_end) {
			/* IP is aligned so, mostly; where it matters the kernel sees to it. */
			__builtin_memcpy(to, __builtin_assume_aligned(from, 4), length);
			return true;
		}
	}
	return !bpf_skb_load_bytes(skb, offset, to, length);
}

static __always_inline void map_ipv4(__be32 *address, __be32 ipv4)
{
	address[0] = 0;
	address[1] = 0;
	address[2] = bpf_htonl(0xffff);
	address[3] = ipv4;
}

static __always_inline bool parse_ipv4(struct __sk_buff *skb, struct packet *pkt)
{
	struct ipv4_header ip;
	u32 length, header;
	u16 fragment;

	if (!load(skb, pkt->l3_offset, &ip, sizeof(ip)))
		return false;
	header = (ip.version_length & 0x0f) * 4;
	length = bpf_ntohs(ip.length);
	if (ip.version_length >> 4 != 4 || header < sizeof(ip))
		return false;
	if (!length) /* longer than 16 bits can say: it was put together by GRO, or will be cut */
		length = skb->len - pkt->l3_offset;
	if (length < header || length > skb->len - pkt->l3_offset)
		return false;

	map_ipv4(pkt->key.source, ip.source);
	map_ipv4(pkt->key.target, ip.target);
	pkt->key.protocol = ip.protocol;
	pkt->ip_checksum = ip.checksum;
	pkt->l4_offset = pkt->l3_offset + header;
	pkt->l4_length = length - header;
	fragment = bpf_ntohs(ip.fragment);
	pkt->fragment = fragment & IPV4_OFFSET;
	pkt->more = fragment & IPV4_MORE;
	pkt->fragment_id = ip.id;
	return true;
}

static __always_inline bool parse_ipv6(struct __sk_buff *skb, struct packet *pkt)
{
	struct ipv6_header ip;
	struct ipv6_extension extension;
	u32 offset = pkt->l3_offset + sizeof(ip), end;
	u8 next;
	int i;

	if (!load(skb, pkt->l3_offset, &ip, sizeof(ip)))
		return false;
	if ((bpf_ntohl(ip.version_flow) >> 28) != 6)
		return false;
	end = ip.length ? offset + bpf_ntohs(ip.length) : skb->len; /* as with IPv4 */
	if (end > skb->len)
		return false;

	__builtin_memcpy(pkt->key.source, ip.source, sizeof(ip.source));
	__builtin_memcpy(pkt->key.target, ip.target, sizeof(ip.target));
	next = ip.next;
	for (i = 0; i < IPV6_EXTENSIONS; i++) {
		u32 length;

		if (next != IPV6_HOP_BY_HOP && next != IPV6_ROUTING && next != IPV6_FRAGMENT &&
		    next != IPV6_AUTHENTICATION && next != IPV6_OPTIONS)
			break;
		if (!load(skb, offset, &extension, sizeof(extension)))
			return false;
		length = (extension.length + 1) * 8;
		if (next == IPV6_FRAGMENT) {
			u16 fragment = bpf_ntohs(extension.fragment);

			length = sizeof(extension);
			pkt->fragment = fragment & IPV6_OFFSET;
			pkt->more = fragment & IPV6_MORE;
			pkt->fragment_id = extension.id;
		} else if (next == IPV6_AUTHENTICATION) {
			length = (extension.length + 2) * 4;
		} else if (next == IPV6_ROUTING && extension.segments_left) {
			return false; /* the target is not yet its last */
		}
		next = extension.next;
		offset += length;
		if (pkt->fragment)
			break; /* what follows is in the middle of something */
	}
	if (offset > end)
		return false;
	pkt->key.protocol = next;
	pkt->l4_offset = offset;
	pkt->l4_length = end - offset;
	return true;
}

static __always_inline bool parse_tcp(struct __sk_buff *skb, struct packet *pkt)
{
	struct tcp_state tcp;
	u32 at = pkt->l4_offset + sizeof(struct l4_header) + sizeof(__be32);

	if (pkt->l4_length < TCP_LENGTH || !load(skb, at, &tcp, sizeof(tcp)))
		return false;
	pkt->control = (tcp.flags & (TCP_FIN | TCP_SYN | TCP_RST | TCP_ACK)) | CONTROLLED;
	pkt->l4_checksum = tcp.checksum;
	return true;
}

static __always_inline bool parse_sctp(struct __sk_buff *skb, struct packet *pkt)
{
	struct sctp_chunk sctp;
	u32 at = pkt->l4_offset + sizeof(struct sctp_header);

	if (pkt->l4_length < sizeof(struct sctp_header) + sizeof(sctp) ||
	    !load(skb, at, &sctp, sizeof(sctp)))
		return false;
	pkt->control = CONTROLLED;
	/* An INIT stands alone, and is the only chunk whose packet has no tag yet (RFC 9260 8.5.1). */
	if (sctp.type == SCTP_INIT && !pkt->isn) {
		pkt->control |= TCP_SYN;
		return load(skb, at + sizeof(sctp), &pkt->isn, sizeof(pkt->isn));
	}
	if (sctp.type == SCTP_ABORT)
		pkt->control |= TCP_RST;
	if (sctp.type == SCTP_SHUTDOWN || sctp.type == SCTP_SHUTDOWN_ACK)
		pkt->control |= TCP_FIN;
	return true;
}

static __always_inline bool parse_l4(struct __sk_buff *skb, struct packet *pkt)
{
	u8 protocol = pkt->key.protocol;
	struct l4_header l4;

	if (is_icmp(pkt))
		return !pkt->fragment && pkt->l4_length >= ICMP_LENGTH &&
		       load(skb, pkt->l4_offset, &pkt->icmp_type, sizeof(pkt->icmp_type));
	if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP && protocol != IPPROTO_SCTP)
		return false;
	if (pkt->fragment)
		return true;
	if (pkt->l4_length < sizeof(l4) || !load(skb, pkt->l4_offset, &l4, sizeof(l4)))
		return false;
	pkt->key.source_port = l4.source_port;
	pkt->key.target_port = l4.target_port;
	pkt->isn = l4.number;
	pkt->l4_checksum = l4.udp_checksum;
	if (protocol == IPPROTO_TCP)
		return parse_tcp(skb, pkt);
	return protocol == IPPROTO_UDP || parse_sctp(skb, pkt);
}

/* Whether it can be a Service's; `l3_offset` is where IP begins. */
static __always_inline bool parse(struct __sk_buff *skb, u32 l3_offset, struct packet *pkt)
{
	u32 ethertype = skb->protocol;

	if (skb->vlan_present && skb->vlan_tci & VLAN_ID)
		return false; /* the VLAN's own device sees it too, without the tag */
	if (ethertype != bpf_htons(ETHERTYPE_IPV4) && ethertype != bpf_htons(ETHERTYPE_IPV6))
		return false;
	pkt->v6 = ethertype & bpf_htons(ETHERTYPE_IPV6 & ~ETHERTYPE_IPV4); /* no constant */
	pkt->l3_offset = l3_offset;
	return (pkt->v6 ? parse_ipv6(skb, pkt) : parse_ipv4(skb, pkt)) && parse_l4(skb, pkt);
}

#endif
