// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The reader of the stress test: looks up a frontend, lets the product's own choose() pick a
 * backend, and judges what it got by the addresses alone. It is run in a tight loop on a CPU of
 * its own, and must know nothing of the order in which the maps are written: that is on trial.
 *
 * Who a frontend and a backend belong to stands in their addresses:
 *   frontend  10.96.CLASS.N     port 80
 *   backend   10.SERVICE(16 bits).ANY     port 1024 + a hash of its address
 * so a backend of another Service, or one put together from two values, gives itself away.
 *
 * Set by the test: STALL. With it a reader sometimes waits at the two worst moments: with an
 * element of `frontends` in hand, and between a word and the slot that it names.
 */

#if STALL
/* choose() asks for a random number between reading the word and reading the slot. */
#define bpf_get_prandom_u32() stalling_random()
static __always_inline u32 stalling_random(void);
#endif

#include "lookup.h"

#undef bpf_get_prandom_u32

#define STALL_LOOPS 400 /* the verifier follows each; of some 300 ns */

/* What the test counts; the names are read from here. */
enum stress {
	STRESS_LOOKUPS = 0,  /* frontends looked up */
	STRESS_FOUND = 1,    /* … that led to a backend */
	STRESS_STALLS = 2,   /* waits at a bad moment */
	STRESS_MISSED = 3,   /* a frontend that has always existed was not found */
	STRESS_REFUSED = 4,  /* a frontend led to no backend: each Service always has some */
	STRESS_FOREIGN = 5,  /* a backend of another Service */
	STRESS_TORN = 6,     /* a backend whose port is not its own */
	STRESS_ID = 7,	     /* a frontend whose value makes no sense */
	STRESS_EXAMPLE = 8,  /* of the last fault: what was dialled, */
	STRESS_EXAMPLE2 = 9, /* and the address that it led to */
	STRESS_COUNT = 10,
};

MAP("percpu_array", stress, u32, u64, 0);

static __always_inline void note(u32 what, u64 value, bool add)
{
	u64 *n = stress.lookup(&what);

	if (n)
		*n = add ? *n + value : value;
}

static __always_inline void wait_a_while(void)
{
	u64 until = bpf_ktime_get_ns() + (bpf_get_prandom_u32() & 0x1ffff); /* 131 us at most */
	int i, k;

	note(STRESS_STALLS, 1, true);
	for (i = 0; i < STALL_LOOPS; i++) {
		u64 now = 0;

#pragma unroll
		for (k = 0; k < 10; k++)
			now = bpf_ktime_get_ns();
		if (now >= until)
			break;
	}
}

#if STALL
static __always_inline u32 stalling_random(void)
{
	u32 random = bpf_get_prandom_u32();

	if (!(random & 7))
		wait_a_while();
	return random * 2654435761U; /* the low bits are spent */
}
#endif

/* Which frontend: classes have as many as the test says, each in its own third octet. */
static __always_inline void choose_frontend(struct frontend_key *key, u32 *class, u32 *number)
{
	u32 random = bpf_get_prandom_u32();

	*class = (random >> 16) % CLASSES;
	*number = (random & 0xffff) % PER_CLASS;
	key->address[2] = bpf_htonl(0xffff);
	key->address[3] = bpf_htonl(0x0a600000 | *class << 8 | *number);
	key->port = bpf_htons(80);
	key->protocol = 6;
}

/* The Services whose backends a frontend may lead to, as the test hands them out. */
static __always_inline bool may_lead_to(u32 class, u32 number, u32 service)
{
	if (service == class * PER_CLASS + number)
		return true;
	return class == CLASS_MOVING && service == (class + 1) * PER_CLASS + number;
}

static __always_inline u16 port_of(u32 address)
{
	return 1024 + ((address * 2654435761U) >> 17);
}

static __always_inline void fault(u32 what, u32 frontend, u32 backend)
{
	note(what, 1, true);
	note(STRESS_EXAMPLE, frontend, false);
	note(STRESS_EXAMPLE2, backend, false);
}

int read_once(struct __sk_buff *skb)
{
	struct frontend_key key = {};
	struct client client = { .path = PATH_SOCKET, .set = node_settings() };
	struct choice chosen = {};
	struct backend_address *to = &chosen.to;
	struct frontend_value *frontend;
	enum verdict verdict;
	u32 class, number, id, dialled, address;

	choose_frontend(&key, &class, &number);
	dialled = bpf_ntohl(key.address[3]);
	note(STRESS_LOOKUPS, 1, true);
	frontend = frontends.lookup(&key);
	if (!frontend) {
		if (class < PERMANENT_CLASSES)
			fault(STRESS_MISSED, dialled, 0);
		return 0;
	}
#if STALL
	if (!(bpf_get_prandom_u32() & 7))
		wait_a_while();
#endif
	id = frontend->id;
	if (!id || frontend->scope > SCOPE_EXTERNAL) {
		fault(STRESS_ID, dialled, id);
		return 0;
	}
	/* One client in 64 has been here before: affinity is used, and also made. One is the host. */
	client.who[0] = bpf_get_prandom_u32() & 63;
	if (!client.set)
		return 0;
	verdict = choose(frontend, &client, &chosen);
	if (verdict != FORWARD) {
		fault(STRESS_REFUSED, dialled, verdict);
		return 0;
	}
	note(STRESS_FOUND, 1, true);
	address = bpf_ntohl(to->address[3]);
	if (to->address[0] || to->address[1] || to->address[2] != bpf_htonl(0xffff) ||
	    bpf_ntohs(to->port) != port_of(address))
		fault(STRESS_TORN, dialled, address);
	else if (!may_lead_to(class, number, (address >> 8) & 0xffff))
		fault(STRESS_FOREIGN, dialled, address);
	return 0;
}
