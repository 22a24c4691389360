/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every map and the question that it answers. The control plane reads this list, makes and pins
 * the maps (their sizes are options of the agent), and compiles the programs with PIN_name and
 * SIZE_name set to what it pinned.
 *
 * MAP(type, name, key, value, flags): flags are those of the bpf system call:
 * 1 no preallocation, 1024 can be mapped into memory.
 */
#ifndef EBPFLB_MAPS_H
#define EBPFLB_MAPS_H

#include "abi.h"

#define MAP(type, name, key, value, flags) \
	BPF_TABLE_PINNED7(type, key, value, name, SIZE_##name, PIN_##name, flags)

/* Which service port does this address, port and protocol belong to? */
MAP("hash", frontends, struct frontend_key, struct frontend_value, 0);
/* Do NodePorts answer at this address of the node? */
MAP("hash", node_addrs, struct node_address_key, struct node_address, 1);
/* Where do new connections of this service port go? */
MAP("array", ports, u32, struct port, 1024);
/* Which address is in this slot of a range, and whose is it? */
MAP("array", backends, u32, struct backend, 1024);
/* Which backend did this client get last time? */
MAP("lru_hash", affinity, struct affinity_key, struct affinity_value, 0);
/* May this backend still be used for what the socket remembers? */
MAP("hash", members, struct member_key, struct member_value, 1);
/* What did this connected socket dial? */
MAP("sk_storage", sock_peer, int, struct sock_peer, 1);
/* Which backends does this unconnected UDP socket talk to? */
MAP("sk_storage", sock_udp, int, struct sock_udp, 1);
/* Which connected UDP sockets are there, and to which backend? */
MAP("hash", udp_conn, u64, struct udp_conn, 1);
/* --- the packet path --- */

/* What becomes of a packet of a new flow, whose client has not gone on after an answer yet? */
MAP("lru_hash", flows_new, struct flow_key, struct flow, 0);
/* What becomes of a packet of a flow that both sides use? A flood of new ones does not reach it. */
MAP("lru_hash", conntrack, struct flow_key, struct flow, 0);
/* Which ports has the packet that this fragment is a part of? */
MAP("lru_hash", fragments, struct fragment_key, struct fragment, 0);
/* May this source dial this service port's load-balancer addresses? */
MAP("lpm_trie", source_ranges, struct source_range_key, struct source_range, 1);
/* Is this a Service's address, and does it answer an echo request? */
MAP("hash", service_addrs, struct service_address_key, struct service_address, 1);
/* What is beyond this device? */
MAP("hash", devices, struct device_key, struct device, 1);

/* How many connections were made to this service port? (by the index of its id) */
MAP("percpu_array", connections, u32, u64, 0);
/* What did the programs do? (enum stat) */
MAP("percpu_array", stats, u32, u64, 0);
/* Did the agent's probe pass this hook? (enum hook) */
MAP("array", probe, u32, struct probe, 1024);
/* What is this service port called? Only user space reads it. */
MAP("hash", names, u32, struct name, 1);
/* What did the agent decide? */
MAP("array", settings, u32, struct settings, 1024);

#endif
