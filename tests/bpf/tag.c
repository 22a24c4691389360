// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Puts a VLAN tag where the kernel and network cards keep it, beside the packet's bytes, and hands
 * the packet on to the program on trial: a test run cannot be given such a packet.
 *
 * The tag is the packet's mark. Set by the test: PIN_next.
 */
#include <uapi/linux/bpf.h>

BPF_TABLE_PINNED("prog", u32, u32, next, 1, PIN_next);

int tag(struct __sk_buff *skb)
{
	u16 tag = skb->mark;

	skb->mark = 0;
	if (bpf_skb_vlan_push(skb, bpf_htons(0x8100), tag))
		return 1;
	next.call(skb, 0);
	return 1; /* nobody took it */
}
