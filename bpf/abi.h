/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The layout of every map key and value: the one source of it. The control plane's packers are
 * generated from this text (ebpflb/datapath/ebpf/abi.py), which reads a small part of C: structs
 * of fixed-width members and arrays of them, enums and decimal defines. Keep to that part.
 *
 * Rules: no implicit padding; network order is a __be type; an address is 16 bytes, IPv4 as
 * ::ffff:a.b.c.d. A value that programs act on is never replaced in a hash map (a reader may still
 * hold the element that the kernel reuses); what changes lives in `ports`, in one aligned word.
 *
 * A layout is part of its map's pin name, so a change here makes a new map. `sock_peer` and
 * `sock_udp` cannot be copied from user space: their spare bytes are there to be used instead.
 */
#ifndef EBPFLB_ABI_H
#define EBPFLB_ABI_H

#define ABI_NAME_LEN 192
#define ABI_OPTIONS_LEN 4032
#define ABI_UDP_FLOWS 8

/* A service-port id: the low bits index `ports`, the high bits are the generation of that slot. */
#define ABI_ID_INDEX_BITS 20

/* Bits of a published word, see `struct port`. */
#define ABI_WORD_COUNT_SHIFT 32
#define ABI_WORD_FLAGS_SHIFT 56

enum word_flag {
	WORD_AFFINITY = 1,   /* look into `affinity` first */
	WORD_NONE = 2,	     /* no endpoint anywhere: reject */
	WORD_NONE_LOCAL = 4, /* endpoints, but none on this node: drop */
	WORD_UNTOUCHED = 8,  /* the socket programs leave this service port alone */
};

/* The two sets of endpoints of a service port; its flags say which is for whom. */
enum endpoint_set {
	SET_CLUSTER = 0,
	SET_LOCAL = 1,
	SET_COUNT = 2,
};

/* Which policy a frontend is under: a ClusterIP under the internal one, all others. */
enum scope {
	SCOPE_INTERNAL = 0,
	SCOPE_EXTERNAL = 1,
};

enum frontend_kind {
	KIND_CLUSTER_IP = 0,
	KIND_NODE_PORT = 1,
	KIND_EXTERNAL_IP = 2,
	KIND_LOAD_BALANCER = 3,
	KIND_PROBE = 4, /* the agent's own test that the hooks run */
};

enum port_flag {
	PORT_INTERNAL_LOCAL = 1, /* internalTrafficPolicy: the local set is for the ClusterIP */
	PORT_EXTERNAL_LOCAL = 2, /* externalTrafficPolicy: … for those who come from outside */
	PORT_IPV6 = 4,
	/* Source ranges: whom the load balancer's addresses are not for, as far as a socket can tell. */
	PORT_LB_NO_PODS = 8,
	PORT_LB_NO_HOST = 16,
};

enum backend_flag {
	BACKEND_LOCAL = 1,
	BACKEND_TERMINATING = 2,
};

/* Why a member is in the set. One entry each: membership is the key, so it never tears. */
enum member_role {
	MEMBER_CLUSTER = 0, /* it is in the cluster set */
	MEMBER_LOCAL = 1,   /* … in the local set */
	MEMBER_SERVING = 2, /* serves open flows */
};

/* Hooks, by which `probe` and the attachment table are indexed. */
enum hook {
	HOOK_CONNECT4 = 0,
	HOOK_CONNECT6 = 1,
	HOOK_SENDMSG4 = 2,
	HOOK_SENDMSG6 = 3,
	HOOK_RECVMSG4 = 4,
	HOOK_RECVMSG6 = 5,
	HOOK_GETPEERNAME4 = 6,
	HOOK_GETPEERNAME6 = 7,
	HOOK_SOCK_RELEASE = 8,
	HOOK_BIND4 = 9,
	HOOK_BIND6 = 10,
	HOOK_COUNT = 11,
};

/* What `stats` counts; the names label the metric. */
enum stat {
	STAT_TRANSLATED = 0,	 /* connects and first datagrams sent to a backend */
	STAT_REFUSED = 1,	 /* refused: no endpoint anywhere */
	STAT_REFUSED_POLICY = 2, /* refused: none that the policy or the source ranges allow */
	STAT_REREAD = 3, /* a backend's owner was not as expected; the word was read again */
	STAT_FOREIGN_BACKEND = 4,  /* … and never was: refused. Must stay 0 */
	STAT_NO_SOCKET_MEMORY = 5, /* translated, but the socket has no room to remember it */
	STAT_UDP_CONN_FULL = 6,	   /* a connected UDP socket could not be indexed */
	STAT_COUNT = 7,
};

struct frontend_key {
	__be32 address[4];
	__be16 port;
	__u8 protocol;
	__u8 pad;
};

struct frontend_value {
	__u32 id;
	__u8 kind;
	__u8 scope;
	__u16 pad;
};

/* An address of this node at which NodePorts answer; their frontends are at the unspecified one. */
struct node_address_key {
	__be32 address[4];
};

struct node_address {
	__u32 pad;
};

/*
 * A service port. A word is {flags:8, count:24, base:32} and is published with one store. The
 * rest is for those who read the map, but for affinity_s: one aligned store as well.
 */
struct port {
	__u64 word[SET_COUNT];
	__u32 id; /* 0: the slot is free; the generation stays in `generation` */
	__u32 affinity_s;
	__u32 draining; /* backends behind the cluster range that serve open flows only */
	__u16 generation;
	__u8 protocol;
	__u8 flags;
};

/* One slot of a range. `owner` is the id of the service port that the range belongs to. */
struct backend {
	__be32 address[4];
	__be16 port;
	__u8 flags;
	__u8 pad;
	__u32 owner;
};

/* The client of the socket path is a network namespace's cookie in client[0]. */
struct affinity_key {
	__u64 client[2];
	__u32 id;
	__u32 path; /* 0: socket; the packet path keeps records of its own */
};

/* An LRU element may be reused under a reader: both checks must be the hash of the key read. */
struct affinity_value {
	__u32 check_head;
	__be16 port;
	__u16 pad;
	__be32 address[4];
	__u64 used_ns;
	__u32 pad_tail;
	__u32 check_tail;
};

struct member_key {
	__be32 address[4];
	__be16 port;
	__u16 role;
	__u32 id;
};

struct member_value {
	__u32 pad;
};

/* What a connected socket dialled, and where it went instead. */
struct sock_peer {
	__be32 frontend[4];
	__be32 backend[4];
	__be16 frontend_port;
	__be16 backend_port;
	__u32 id;
	__u64 spare;
};

/* One conversation of an unconnected UDP socket. */
struct udp_flow {
	__be32 frontend[4];
	__be32 backend[4];
	__be16 frontend_port;
	__be16 backend_port;
	__u32 id;
	__u64 used_ns;
	__u32 answered;
	__u32 pad;
};

struct sock_udp {
	struct udp_flow flow[ABI_UDP_FLOWS];
	__u64 spare;
};

/* A connected UDP socket, by its cookie; only user space reads these. */
struct udp_conn {
	__be32 backend[4];
	__be16 backend_port;
	__u8 scope; /* of the frontend that was dialled, and its kind */
	__u8 kind;
	__u32 id;
	__u64 netns;
};

struct name {
	char text[ABI_NAME_LEN];
};

enum setting_flag {
	SETTING_LOOPBACK4 = 1,	 /* NodePorts answer the host at 127.0.0.0/8 */
	SETTING_LOOPBACK6 = 2,	 /* … at ::1 */
	SETTING_TELLS_PODS4 = 4, /* pods are not outside, for externalTrafficPolicy Local */
	SETTING_TELLS_PODS6 = 8,
};

/* What the programs read, then what the agent leaves for the commands (JSON). */
struct settings {
	__u64 host_netns;
	__u64 udp_timeout_ns;
	__u64 udp_stream_timeout_ns;
	__u64 programs; /* hash of the text that the attached programs were made from; 0: mixed */
	__u64 flags;	/* enum setting_flag */
	__u64 spare[3];
	char options[ABI_OPTIONS_LEN];
};

/* Written by a hook that meets the probe's frontend, for the one socket that the agent expects. */
struct probe {
	__u64 expected;
	__u64 socket;
	__u64 netns;
	__u64 runs; /* how often a hook has met one: a program that is tried beside another adds one */
};

#endif
