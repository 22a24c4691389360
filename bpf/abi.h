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
#define ABI_OPTIONS_LEN 3928
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
	PORT_LB_RANGES = 32, /* … and a packet's source must be in `source_ranges` */
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
	HOOK_INGRESS = 11, /* tc: what a device receives */
	HOOK_EGRESS = 12,  /* tc: what it sends */
	HOOK_COUNT = 13,
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
	/* The packet path. */
	STAT_LEFT_TO_PACKETS = 7,   /* a socket's connect that only its packets can decide */
	STAT_REJECTED = 8,	    /* a packet to be answered with an ICMP error: no endpoint */
	STAT_DROPPED_POLICY = 9,    /* dropped: none that the policy allows */
	STAT_DROPPED_RANGE = 10,    /* dropped: its source is in no source range */
	STAT_DROPPED_FRAGMENT = 11, /* dropped: a fragment that came before its head */
	STAT_DROPPED_PORTS = 12,    /* dropped: no free source port for a second frontend's flow */
	STAT_DROPPED_UNWRITABLE = 13, /* dropped: the kernel did not let us write the packet */
	STAT_DROPPED_MIGRATING = 14,  /* dropped: a flow that is just being carried over */
	STAT_DROPPED_FOREIGN = 15,    /* dropped: the maps contradict each other. Must stay 0 */
	STAT_REPORTED = 16,	      /* flows that were given another source port */
	STAT_FOREIGN_FLOWS = 17, /* flows that leave from a NodePort's number and are not ours */
	STAT_PINGS = 18,	 /* echo requests to a Service address that were answered */
	STAT_ICMP_ERRORS = 19,	 /* ICMP errors whose inner packet was mended */
	STAT_COUNT = 20,
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

/* --- the packet path --- */

/* A packet's addresses and ports as a hook sees them: of a translated flow each way has its own. */
struct flow_key {
	__be32 source[4];
	__be32 target[4];
	__be16 source_port;
	__be16 target_port;
	__u8 protocol;
	__u8 pad[3];
};

enum flow_kind {
	FLOW_FORWARD = 1, /* to a frontend: its target becomes the backend */
	FLOW_REVERSE = 2, /* from a backend: its source becomes the frontend */
	FLOW_FOREIGN = 3, /* to a NodePort's number, but an answer to others: left alone */
};

enum flow_flag {
	FLOW_MASQUERADE = 1, /* every packet of the forward way bears the mark */
	FLOW_HOST = 2,	     /* of this node itself: forward at egress, reverse at ingress */
};

/* What the sender of this half has sent. */
enum flow_seen {
	FLOW_SEEN_FIN = 1,
	FLOW_SEEN_RST = 2,
};

/*
 * One half of a flow. An LRU element may be reused under a reader: both checks must be the hash of
 * the key that was looked up. Only `used_ns` and `syn_ns` are stored in place (harmless to another
 * flow); all else changes by an update of the whole value.
 *
 * Frozen: open connections live in it. What is new goes into the spare bytes.
 */
struct flow {
	__u32 check_head;
	__u8 kind;	   /* enum flow_kind */
	__u8 flags;	   /* enum flow_flag */
	__u8 seen;	   /* enum flow_seen */
	__u8 scope;	   /* of the frontend, and its kind */
	__be32 address[4]; /* forward: the backend; reverse: the frontend */
	__be16 port;
	__be16 client_port; /* forward: as the backend sees it; reverse: as the client has it */
	__u32 id;
	__u64 used_ns;
	__u64 syn_ns; /* when an open flow saw a SYN that nobody has answered since */
	__u64 created_ns;
	__u32 isn; /* of the SYN that made it (SCTP: the initiate tag) */
	__u8 frontend_kind;
	__u8 spare[3];
	__u32 device; /* that the client's packets come in on */
	__u32 spare_tail;
	__u32 pad_tail;
	__u32 check_tail;
};

/* The head of a fragmented packet: only it has the ports. */
struct fragment_key {
	__be32 source[4];
	__be32 target[4];
	__be32 id;
	__u8 protocol;
	__u8 pad[3];
};

struct fragment {
	__u32 check_head;
	__be16 source_port;
	__be16 target_port;
	__u32 seen_s; /* since boot */
	__u32 check_tail;
};

/* Longest prefix first: {id, address} in so many bits, 32 of the id and the network's. */
struct source_range_key {
	__u32 bits;
	__u32 id;
	__be32 address[4];
};

struct source_range {
	__u32 pad;
};

enum address_role {
	ADDRESS_KNOWN = 0,   /* a frontend has this address (NodePorts do not count) */
	ADDRESS_ANSWERS = 1, /* … and an endpoint: it answers an echo request */
};

struct service_address_key {
	__be32 address[4];
	__u32 role;
};

struct service_address {
	__u32 pad;
};

enum device_role {
	DEVICE_POD = 0,	    /* what comes in here counts as local pods' (by interface, MASQ-09) */
	DEVICE_BRIDGED = 1, /* a port of a bridge: pods beyond it reach each other without us */
	DEVICE_UPLINK = 2,
	DEVICE_EGRESS_FIRST = 3, /* another's program ends the chain there: ours runs before it */
};

struct device_key {
	__u32 index;
	__u32 role;
};

struct device {
	__u32 pad;
};

struct name {
	char text[ABI_NAME_LEN];
};

/* What the plan says of the node. */
enum setting_flag {
	SETTING_LOOPBACK4 = 1,	 /* NodePorts answer the host at 127.0.0.0/8 */
	SETTING_LOOPBACK6 = 2,	 /* … at ::1 */
	SETTING_TELLS_PODS4 = 4, /* pods are not outside, for externalTrafficPolicy Local */
	SETTING_TELLS_PODS6 = 8,
	SETTING_MASQUERADE_ALL = 16,  /* every packet to a ClusterIP is source-NATed */
	SETTING_PODS_BY_NET4 = 32,    /* a pod is told by its address: `pods4` */
	SETTING_PODS_BY_NET6 = 64,    /* … `pods6` */
	SETTING_PODS_BY_DEVICE = 128, /* … by the device that its packet came in on: `devices` */
};

/* What the packet path can do on this node now. */
enum state_flag {
	STATE_SEES_PODS =
		1, /* programs are on the pods' devices: what connect() cannot know waits */
	STATE_SEES_HOST = 2,		/* … and on the uplinks */
	STATE_PODS_BY_PACKET = 4,	/* the socket programs leave pods alone altogether */
	STATE_PING = 8,			/* an echo request to a Service address is answered */
	STATE_KEEP_CLIENT = 16,		/* no source NAT where the backend is on this node */
	STATE_MASQUERADE_BRIDGED4 = 32, /* netfilter does not see what a bridge switches */
	STATE_MASQUERADE_BRIDGED6 = 64,
	STATE_DRAINING = 128,  /* no new flows: the packet path is about to go */
	STATE_MIGRATING = 256, /* flows are being carried over from another layout */
};

/* Addresses of pods on this node, or of the cluster: as the local-traffic detector has it. */
struct subnet {
	__be32 address[4];
	__be32 mask[4];
};

/* What the programs read, then what the agent leaves for the commands (JSON). */
struct settings {
	__u64 host_netns;
	__u64 udp_timeout_ns;
	__u64 udp_stream_timeout_ns;
	__u64 programs; /* hash of the text that the attached programs were made from; 0: mixed */
	__u64 flags;	/* enum setting_flag */
	__u64 state;	/* enum state_flag */
	__u64 tcp_timeout_ns;  /* of an open connection that nobody uses */
	__u64 tcp_closing_ns;  /* … that one side has closed */
	__u32 masquerade_mark; /* one bit: netfilter gives the packet this node's address */
	__u32 reject_mark;     /* one bit: netfilter answers it with port-unreachable */
	struct subnet pods4;
	struct subnet pods6;
	__u64 packet_programs; /* as `programs`, of the packet path */
	__u64 spare[3];
	char options[ABI_OPTIONS_LEN];
};

/*
 * Written by a hook that meets the probe's frontend, for the one socket that the agent expects. A
 * tc hook has a number that the probe packet carries in place of the cookie, and the device's index
 * in place of the network namespace.
 */
struct probe {
	__u64 expected;
	__u64 socket;
	__u64 netns;
	__u64 runs; /* how often a hook has met one: a program that is tried beside another adds one */
};

#endif
