/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How the socket programs refuse. Touches the maps (it counts), never a packet.
 *
 * Since 5.18 a program can choose the error of connect(). Before that a connect() to port 0 of
 * the loopback gives the same ECONNREFUSED at once. UDP goes there on every kernel: its error
 * must come on the next call, and a datagram to port 0 finds nobody.
 */
#ifndef EBPFLB_REJECT_H
#define EBPFLB_REJECT_H

#include "lookup.h"

#define ECONNREFUSED 111

#if HAVE_RETVAL
/* Not in the headers of every bcc that we compile with. */
static int (*get_retval)(void) = (void *)186;
static int (*set_retval)(int error) = (void *)187;
#endif

/* All attached programs run, also after one refused: leave its error, and no state, behind. */
static __always_inline bool already_refused(void)
{
#if HAVE_RETVAL
	return get_retval() < 0;
#else
	return false;
#endif
}

/* Whether connect() will now fail; where it cannot be told to, it must be sent `nowhere`. */
static __always_inline bool refuse(void)
{
#if HAVE_RETVAL
	set_retval(-ECONNREFUSED);
	return true;
#else
	return false;
#endif
}

static __always_inline void nowhere(const __be32 *dialled, struct backend_address *to)
{
	bool v4 = !dialled[0] && !dialled[1] && dialled[2] == bpf_htonl(0xffff);

	to->address[0] = 0;
	to->address[1] = 0;
	to->address[2] = v4 ? bpf_htonl(0xffff) : 0;
	to->address[3] = v4 ? bpf_htonl(0x7f000001) : bpf_htonl(1);
	to->port = 0;
}

static __always_inline void count_refusal(enum verdict verdict)
{
	count(verdict == REJECT_POLICY ? STAT_REFUSED_POLICY : STAT_REFUSED);
}

#endif
