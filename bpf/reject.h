/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How the socket programs refuse. Touches the maps (it counts), never a packet.
 *
 * Since 5.18 a program can choose the error of connect(). Before that a connect() to port 0 of
 * the loopback gives TCP the same ECONNREFUSED at once. UDP is sent to port 1 of the loopback on
 * every kernel: its error must come on the next call, as from a REJECT on the way, and with port 0
 * it would have no peer name, and EINVAL from a mapped address.
 */
#ifndef EBPFLB_REJECT_H
#define EBPFLB_REJECT_H

#include "lookup.h"

#define EADDRINUSE 98
#define ECONNREFUSED 111
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17

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

/* Whether the call will now fail so; where connect() cannot, it must be sent `nowhere`. */
static __always_inline bool refuse(int error)
{
#if HAVE_RETVAL
	set_retval(-error);
	return true;
#else
	return false;
#endif
}

static __always_inline void nowhere(const struct frontend_key *dialled, struct backend_address *to)
{
	to->address[0] = 0;
	to->address[1] = 0;
	to->address[2] = is_ipv4(dialled->address) ? bpf_htonl(0xffff) : 0;
	set_loopback(to->address);
	to->port = dialled->protocol == IPPROTO_TCP ? 0 : bpf_htons(1);
}

static __always_inline void count_refusal(enum verdict verdict)
{
	if (verdict != REJECT_FOREIGN) /* counted where it was found */
		count(verdict == REJECT ? STAT_REFUSED : STAT_REFUSED_POLICY);
}

#endif
