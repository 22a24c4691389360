/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * SCTP's CRC32c (RFC 9260, appendix A) after other ports were stored. Writes the packet, touches no
 * map.
 *
 * A CRC is linear: that of a changed packet differs by the CRC of the change alone, begun with zero.
 * The change is the first four bytes, so it is they, times x for each bit of the packet, modulo the
 * CRC's polynomial; the packet itself need not be read.
 */
#ifndef EBPFLB_SCTP_H
#define EBPFLB_SCTP_H

#include "parse.h"

/* In all of these the highest bit is x^0, as in the CRC; and x^32 is left out. */
#define CRC32C_POLYNOMIAL 0x82f63b78

/* Where in the header it lies. */
#define SCTP_CRC 8
/* Of a packet's length in bits; in bytes it has 16. */
#define SCTP_LENGTH_BITS 19

/* The only number in all these headers whose lowest byte comes first. */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define little_endian(value) (value)
#else
#define little_endian(value) __builtin_bswap32(value)
#endif

/* Registers of 64 bits, and no branches: the verifier has fewer instructions to go through. */
static __always_inline u64 crc_times_x(u64 a)
{
	return a >> 1 ^ (a & 1) * CRC32C_POLYNOMIAL;
}

static __always_inline u64 crc_multiply(u64 a, u64 b)
{
	u64 product = 0;
	int i;

#pragma clang loop unroll(disable)
	for (i = 31; i >= 0; i--) {
		product ^= (a >> i & 1) * b;
		b = crc_times_x(b);
	}
	return product;
}

/* The square of a sum is the sum of the squares: x^0 to x^15 move, those of the others are known. */
static __always_inline u64 crc_square(u64 a)
{
	const u32 squares[16] = {
		0x82f63b78, 0x20bd8ede, 0x8ad958cf, 0xe13b70f7, 0xfbc3faf9, 0x7f8be302,
		0x9d14c3b8, 0x274530ee, 0x8b277743, 0xe144fb14, 0x38513ec5, 0x4f6f520d,
		0x52a0c93f, 0xd725148b, 0xf64463e6, 0xbf672381,
	};
	u64 square = a >> 16;
	int i;

	square = (square | square << 8) & 0x00ff00ff;
	square = (square | square << 4) & 0x0f0f0f0f;
	square = (square | square << 2) & 0x33333333;
	square = (square | square << 1) & 0x55555555;
	square <<= 1;
#pragma clang loop unroll(full)
	for (i = 0; i < 16; i++)
		square ^= (a >> (15 - i) & 1) * squares[i];
	return square;
}

/* x to the power of so many. */
static __always_inline u64 crc_power(u32 exponent)
{
	u64 power = 0x80000000;
	int i;

#pragma clang loop unroll(disable)
	for (i = SCTP_LENGTH_BITS - 1; i >= 0; i--) {
		power = crc_square(power);
		power ^= (exponent >> i & 1) * (power ^ crc_times_x(power));
	}
	return power;
}

/*
 * Whether the CRC is still to be filled in, by the device or on the way to it. Then the field is
 * zero, and must stay so: it is summed up with the rest. The kernel does not tell, but it leaves
 * such a field alone when it is asked to mend a checksum.
 */
static __always_inline bool is_crc_to_come(struct __sk_buff *skb, u32 at)
{
	u16 probe = 0;

	if (bpf_l4_csum_replace(skb, at, 0, 1, sizeof(probe)) ||
	    bpf_skb_load_bytes(skb, at, &probe, sizeof(probe)) || !probe)
		return true;
	probe = 0;
	bpf_skb_store_bytes(skb, at, &probe, sizeof(probe), 0);
	return false;
}

/*
 * Mends the CRC of a packet that was given these ports; not 0: it cannot be, and the packet must
 * not go on. That is the first of several fragments, since nobody knows how long they all are.
 */
static __always_inline int sctp_mend_crc(struct __sk_buff *skb, const struct packet *pkt,
					 __be16 old_source, __be16 new_source, __be16 old_target,
					 __be16 new_target)
{
	u32 at = pkt->l4_offset + SCTP_CRC, crc, change;
	u16 ports[2] = { old_source ^ new_source, old_target ^ new_target };

	if (pkt->fragment)
		return 0; /* it has neither ports nor a CRC */
	if (pkt->more || bpf_skb_load_bytes(skb, at, &crc, sizeof(crc)))
		return -1;
	if (!crc && is_crc_to_come(skb, at))
		return 0;
	__builtin_memcpy(&change, ports, sizeof(change));
	change = crc_multiply(little_endian(change), crc_power(pkt->l4_length * 8));
	crc ^= little_endian(change);
	return bpf_skb_store_bytes(skb, at, &crc, sizeof(crc), BPF_F_RECOMPUTE_CSUM);
}

#endif
