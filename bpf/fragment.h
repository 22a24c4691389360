/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The ports of fragments: the first one has them, and the others are known by what they share with
 * it. Touches the maps, never a packet. One that comes before its head cannot be helped: a program
 * has nowhere to keep it.
 */
#ifndef EBPFLB_FRAGMENT_H
#define EBPFLB_FRAGMENT_H

#include "lookup.h"
#include "parse.h"

/* So long a host waits for the rest (RFC 8200 4.5); then the number may be another datagram's. */
#define REASSEMBLY_S 60

static __always_inline void fragment_key(const struct packet *pkt, struct fragment_key *key)
{
	copy_address(key->source, pkt->key.source);
	copy_address(key->target, pkt->key.target);
	key->id = pkt->fragment_id;
	key->protocol = pkt->key.protocol;
}

/* As for a flow. */
static __always_inline u32 fragment_check(const struct fragment_key *key)
{
	u64 mix = (((u64)key->source[3] << 32) | key->source[2]) * 0x9e3779b97f4a7c15ULL;

	mix ^= (((u64)key->source[1] << 32) | key->source[0]) * 0xc2b2ae3d27d4eb4fULL;
	mix ^= (((u64)key->target[3] << 32) | key->target[2]) * 0x165667b19e3779f9ULL;
	mix ^= (((u64)key->target[1] << 32) | key->target[0]) * 0xd6e8feb86659fd93ULL;
	mix ^= (((u64)key->id << 32) | key->protocol) * 0xa0761d6478bd642fULL;
	return (u32)(mix >> 32) | 1;
}

/* The head is about to be translated: those that follow come with the same addresses. */
static __always_inline void note_head(const struct packet *pkt)
{
	struct fragment_key key = {};
	struct fragment ports = {};

	fragment_key(pkt, &key);
	ports.check_head = fragment_check(&key);
	ports.source_port = pkt->key.source_port;
	ports.target_port = pkt->key.target_port;
	ports.seen_s = bpf_ktime_get_ns() / NSEC_PER_SEC;
	ports.check_tail = ports.check_head;
	fragments.update(&key, &ports);
}

static __always_inline void forget_head(const struct packet *pkt)
{
	struct fragment_key key = {};

	fragment_key(pkt, &key);
	fragments.delete(&key);
}

/* Gives a fragment its head's ports; false where no head was translated. */
static __always_inline bool recall_ports(struct packet *pkt)
{
	struct fragment_key key = {};
	struct fragment *found, ports;
	u32 check;

	fragment_key(pkt, &key);
	found = fragments.lookup(&key);
	if (!found)
		return false;
	ports = *found;
	check = fragment_check(&key);
	if (ports.check_head != check || ports.check_tail != check ||
	    (u32)(bpf_ktime_get_ns() / NSEC_PER_SEC) - ports.seen_s > REASSEMBLY_S)
		return false;
	pkt->key.source_port = ports.source_port;
	pkt->key.target_port = ports.target_port;
	return true;
}

#endif
