// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The socket programs: a socket that dials a Service is given a backend instead, and goes on
 * seeing the Service. They run at the root of cgroup v2, in process context, under the socket's
 * lock, and never see a packet. What is not a Service's is left alone. (bind4 and bind6 are attached
 * only where the agent is asked to keep others off NodePorts.)
 *
 * Set by the loader: HAVE_RETVAL (the kernel lets a program choose connect()'s error, 5.18),
 * SHOW_SERVICE_TCP (getpeername() of TCP shows the Service).
 */
#include "lookup.h"
#include "reject.h"

/* ctx fields can be read by literal offset only, so the family must be a constant here. */
static __always_inline void read_address(const struct bpf_sock_addr *ctx, bool v6, __be32 *address,
					 __be16 *port)
{
	if (v6) {
		address[0] = ctx->user_ip6[0];
		address[1] = ctx->user_ip6[1];
		address[2] = ctx->user_ip6[2];
		address[3] = ctx->user_ip6[3];
	} else {
		address[0] = 0;
		address[1] = 0;
		address[2] = bpf_htonl(0xffff);
		address[3] = ctx->user_ip4;
	}
	*port = ctx->user_port;
}

/* Whom a client dials: to every system call the unspecified address means the loopback. */
static __always_inline void read_dialled(const struct bpf_sock_addr *ctx, bool v6,
					 struct frontend_key *dialled)
{
	read_address(ctx, v6, dialled->address, &dialled->port);
	dialled->protocol = ctx->protocol;
	if (is_unspecified(dialled->address))
		set_loopback(dialled->address);
}

/* One more look-up where no Service is dialled, a third where NodePorts answer at the address. */
static __always_inline struct frontend_value *find_frontend(struct bpf_sock_addr *ctx,
							    struct frontend_key *dialled)
{
	struct frontend_value *found = frontends.lookup(dialled);

	if (found)
		return found;
	if (is_loopback(dialled->address)) {
		if (!has_loopback_node_ports(dialled->address, bpf_get_netns_cookie(ctx)))
			return NULL;
	} else if (!has_node_ports(dialled->address)) {
		return NULL;
	}
	return find_node_port(dialled);
}

/*
 * Whom a socket's connection would go to. What only a packet can tell, its source foremost, or what
 * only a packet can do, be dropped in silence, waits for the packets of those whom the packet path
 * sees (NOEP-04, LB-06; NOEP-10, CT-09: the same UDP flow works once there is an endpoint).
 */
static __always_inline enum verdict choose_for(struct bpf_sock_addr *ctx,
					       const struct frontend_key *dialled,
					       const struct frontend_value *frontend,
					       struct choice *chosen)
{
	struct client client = { .path = PATH_SOCKET, .set = node_settings() };
	enum verdict verdict;

	if (!client.set)
		return UNTOUCHED;
	client.who[0] = bpf_get_netns_cookie(ctx);
	if (client.set->state & STATE_PODS_BY_PACKET && !is_of_host(&client))
		return LEFT_TO_PACKETS;
	verdict = choose(frontend, &client, chosen);
	if (verdict == FORWARD || verdict == UNTOUCHED || !meets_packets(&client))
		return verdict;
	if (verdict == REJECT_POLICY || verdict == REJECT_RANGE ||
	    (verdict == REJECT && dialled->protocol == IPPROTO_UDP && !is_of_host(&client)))
		return LEFT_TO_PACKETS;
	return verdict;
}

/* For an IPv4-mapped address the first three words stay as they are: no family is crossed. */
static __always_inline void write_address(struct bpf_sock_addr *ctx, bool v6, const __be32 *address,
					  __be16 port)
{
	if (v6) {
		ctx->user_ip6[0] = address[0];
		ctx->user_ip6[1] = address[1];
		ctx->user_ip6[2] = address[2];
		ctx->user_ip6[3] = address[3];
	} else {
		ctx->user_ip4 = address[3];
	}
	ctx->user_port = port;
}

static __always_inline void note_probe(struct bpf_sock_addr *ctx, u32 hook)
{
	struct probe *seen = probe.lookup(&hook);
	u64 cookie = bpf_get_socket_cookie(ctx);

	if (!seen || seen->expected != cookie)
		return;
	seen->netns = bpf_get_netns_cookie(ctx);
	seen->socket = cookie;
	__sync_fetch_and_add(&seen->runs, 1);
}

/* Two Services on one backend cannot be told apart by a datagram: the last used one is shown. */
static __always_inline struct udp_flow *flow_from(struct sock_udp *udp, const __be32 *address,
						  __be16 port)
{
	struct udp_flow *latest = NULL;
	int i;

#pragma unroll
	for (i = 0; i < ABI_UDP_FLOWS; i++) {
		struct udp_flow *flow = &udp->flow[i];

		if (flow->backend_port == port && same_address(flow->backend, address) &&
		    (!latest || flow->used_ns > latest->used_ns))
			latest = flow;
	}
	return latest;
}

/* Its backend was dialled by its own address: from now on that is whom the socket hears from. */
static __always_inline void forget_flow(struct sock_udp *udp, const struct frontend_key *dialled)
{
	struct udp_flow *flow = flow_from(udp, dialled->address, dialled->port);

	if (!flow)
		return;
	flow->frontend_port = 0;
	flow->backend_port = 0;
	flow->used_ns = 0;
}

/* The socket no longer talks to a Service: AF_UNSPEC runs no hook, so this is the first we hear. */
static __always_inline void forget_peer(struct bpf_sock_addr *ctx)
{
	u64 cookie;

	if (ctx->protocol != IPPROTO_UDP && !SHOW_SERVICE_TCP)
		return; /* such sockets have no record */
	if (!ctx->sk || sock_peer.sk_storage_delete(ctx->sk))
		return; /* it dialled no Service before */
	if (ctx->protocol != IPPROTO_UDP)
		return;
	cookie = bpf_get_socket_cookie(ctx);
	udp_conn.delete(&cookie);
}

/* What is dialled now is no Service, or one that is left to others. */
static __always_inline void forget(struct bpf_sock_addr *ctx, const struct frontend_key *dialled)
{
	struct sock_udp *udp;

	forget_peer(ctx);
	if (ctx->protocol != IPPROTO_UDP || !ctx->sk)
		return;
	udp = sock_udp.sk_storage_get(ctx->sk, NULL, 0);
	if (udp)
		forget_flow(udp, dialled);
}

/* `to` is where the socket goes; a refused UDP socket goes `nowhere`. */
static __always_inline void note_peer(struct bpf_sock_addr *ctx, const struct frontend_key *dialled,
				      const struct frontend_value *frontend,
				      const struct backend_address *to)
{
	struct udp_conn conn = {};
	struct sock_peer *peer;
	u64 cookie;

	if (ctx->protocol != IPPROTO_UDP && !SHOW_SERVICE_TCP)
		return;
	peer = ctx->sk ? sock_peer.sk_storage_get(ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE) :
			 NULL;
	if (!peer) {
		count(STAT_NO_SOCKET_MEMORY); /* nor indexed: nothing would take that back */
		return;
	}
	copy_address(peer->frontend, dialled->address);
	copy_address(peer->backend, to->address);
	peer->frontend_port = dialled->port;
	peer->backend_port = to->port;
	peer->id = frontend->id;
	if (ctx->protocol != IPPROTO_UDP)
		return;
	copy_address(conn.backend, to->address);
	conn.backend_port = to->port;
	conn.scope = frontend->scope;
	conn.kind = frontend->kind;
	conn.id = frontend->id;
	conn.netns = bpf_get_netns_cookie(ctx);
	cookie = bpf_get_socket_cookie(ctx);
	if (udp_conn.update(&cookie, &conn))
		count(STAT_UDP_CONN_FULL);
}

static __always_inline int on_connect(struct bpf_sock_addr *ctx, bool v6)
{
	struct choice chosen = {};
	struct backend_address *to = &chosen.to;
	struct frontend_key dialled = {};
	struct frontend_value *found, frontend;
	enum verdict verdict;

	read_dialled(ctx, v6, &dialled);
	found = find_frontend(ctx, &dialled);
	if (found && found->kind == KIND_PROBE) {
		note_probe(ctx, v6 ? HOOK_CONNECT6 : HOOK_CONNECT4);
		return 1;
	}
	if (already_refused())
		return 1;
	if (!found) {
		forget(ctx, &dialled);
		return 1;
	}
	frontend = *found;
	verdict = choose_for(ctx, &dialled, &frontend, &chosen);
	if (verdict == UNTOUCHED || verdict == LEFT_TO_PACKETS) {
		if (verdict == LEFT_TO_PACKETS)
			count(STAT_LEFT_TO_PACKETS);
		forget(ctx, &dialled);
		return 1;
	}
	if (verdict != FORWARD) {
		count_refusal(verdict);
		if (ctx->protocol == IPPROTO_TCP && refuse(ECONNREFUSED))
			return 0;
		/* UDP gets its error on the next call, as from a REJECT on the way (NOEP-10). */
		nowhere(&dialled, to);
		note_peer(ctx, &dialled, &frontend, to);
		write_address(ctx, v6, to->address, to->port);
		return 1;
	}
	note_peer(ctx, &dialled, &frontend, to);
	count_connection(frontend.id);
	write_address(ctx, v6, to->address, to->port);
	return 1;
}

/* A flow is used again while its backend serves and conntrack would still know it. */
static __always_inline bool usable(const struct udp_flow *flow, u32 id, u64 now)
{
	const struct settings *set = node_settings();
	struct backend_address backend = {};
	u64 timeout;

	if (!set || flow->id != id)
		return false;
	timeout = flow->answered ? set->udp_stream_timeout_ns : set->udp_timeout_ns;
	if (now - flow->used_ns >= timeout)
		return false;
	copy_address(backend.address, flow->backend);
	backend.port = flow->backend_port;
	return is_member(id, &backend, MEMBER_SERVING);
}

static __always_inline struct udp_flow *flow_to(struct sock_udp *udp,
						const struct frontend_key *dialled)
{
	int i;

#pragma unroll
	for (i = 0; i < ABI_UDP_FLOWS; i++) {
		struct udp_flow *flow = &udp->flow[i];

		if (flow->frontend_port == dialled->port &&
		    same_address(flow->frontend, dialled->address))
			return flow;
	}
	return NULL;
}

static __always_inline struct udp_flow *oldest_flow(struct sock_udp *udp)
{
	struct udp_flow *oldest = &udp->flow[0];
	int i;

#pragma unroll
	for (i = 1; i < ABI_UDP_FLOWS; i++)
		if (udp->flow[i].used_ns < oldest->used_ns)
			oldest = &udp->flow[i];
	return oldest;
}

/*
 * A connected socket hears from its peer alone, so a datagram that it sends to the same Service by
 * name must go there too. One that AF_UNSPEC disconnected tells us so here.
 */
static __always_inline bool send_to_peer(struct bpf_sock_addr *ctx, bool v6,
					 const struct frontend_key *dialled)
{
	struct bpf_sock *sk = ctx->sk;
	struct sock_peer *peer = sk ? sock_peer.sk_storage_get(sk, NULL, 0) : NULL;

	if (!peer)
		return false;
	if (sk->state != BPF_TCP_ESTABLISHED) {
		forget_peer(ctx);
		return false;
	}
	if (peer->frontend_port != dialled->port || !same_address(peer->frontend, dialled->address))
		return false;
	write_address(ctx, v6, peer->backend, peer->backend_port);
	return true;
}

static __always_inline void note_flow(struct bpf_sock_addr *ctx, const struct frontend_key *dialled,
				      u32 id, u64 now, const struct backend_address *to)
{
	struct sock_udp *udp;
	struct udp_flow *flow;

	udp = ctx->sk ? sock_udp.sk_storage_get(ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE) : NULL;
	if (!udp) {
		count(STAT_NO_SOCKET_MEMORY);
		return;
	}
	flow = flow_to(udp, dialled);
	if (!flow)
		flow = oldest_flow(udp);
	copy_address(flow->frontend, dialled->address);
	copy_address(flow->backend, to->address);
	flow->frontend_port = dialled->port;
	flow->backend_port = to->port;
	flow->id = id;
	flow->used_ns = now;
	flow->answered = 0;
}

static __always_inline int on_sendmsg(struct bpf_sock_addr *ctx, bool v6)
{
	struct choice chosen = {};
	struct backend_address *to = &chosen.to;
	struct frontend_key dialled = {};
	struct frontend_value *frontend;
	struct sock_udp *udp;
	struct udp_flow *flow;
	enum verdict verdict;
	u32 id;
	u64 now;

	if (already_refused())
		return 1;
	read_dialled(ctx, v6, &dialled);
	if (send_to_peer(ctx, v6, &dialled))
		return 1;
	udp = ctx->sk ? sock_udp.sk_storage_get(ctx->sk, NULL, 0) : NULL;
	frontend = find_frontend(ctx, &dialled);
	if (!frontend || frontend->kind == KIND_PROBE) {
		if (udp)
			forget_flow(udp, &dialled);
		return 1;
	}
	id = frontend->id;
	now = bpf_ktime_get_ns();
	flow = udp ? flow_to(udp, &dialled) : NULL;
	if (flow && usable(flow, id, now)) {
		flow->used_ns = now;
		write_address(ctx, v6, flow->backend, flow->backend_port);
		return 1;
	}

	verdict = choose_for(ctx, &dialled, frontend, &chosen);
	if (verdict == UNTOUCHED || verdict == LEFT_TO_PACKETS) {
		if (verdict == LEFT_TO_PACKETS)
			count(STAT_LEFT_TO_PACKETS);
		if (udp)
			forget_flow(udp, &dialled);
		return 1;
	}
	if (verdict != FORWARD) {
		count_refusal(verdict);
		nowhere(&dialled, to);
		write_address(ctx, v6, to->address, to->port);
		return 1;
	}
	note_flow(ctx, &dialled, id, now, to);
	count_connection(id);
	write_address(ctx, v6, to->address, to->port);
	return 1;
}

/* Shows the Service in place of the backend that the socket is connected to. */
static __always_inline bool show_peer(struct bpf_sock_addr *ctx, bool v6, const __be32 *address,
				      __be16 port)
{
	struct sock_peer *peer = ctx->sk ? sock_peer.sk_storage_get(ctx->sk, NULL, 0) : NULL;

	if (!peer || peer->backend_port != port || !same_address(peer->backend, address))
		return false;
	write_address(ctx, v6, peer->frontend, peer->frontend_port);
	return true;
}

static __always_inline int on_recvmsg(struct bpf_sock_addr *ctx, bool v6)
{
	struct sock_udp *udp;
	struct udp_flow *flow;
	__be32 address[4];
	__be16 port;

	read_address(ctx, v6, address, &port);
	if (show_peer(ctx, v6, address, port))
		return 1;
	udp = ctx->sk ? sock_udp.sk_storage_get(ctx->sk, NULL, 0) : NULL;
	flow = udp ? flow_from(udp, address, port) : NULL;
	if (!flow || !port)
		return 1;
	flow->answered = 1;
	flow->used_ns = bpf_ktime_get_ns();
	write_address(ctx, v6, flow->frontend, flow->frontend_port);
	return 1;
}

static __always_inline int on_getpeername(struct bpf_sock_addr *ctx, bool v6)
{
	__be32 address[4];
	__be16 port;

	read_address(ctx, v6, address, &port);
	show_peer(ctx, v6, address, port);
	return 1;
}

/* Whether a NodePort of this port number answers at the address that a socket asks for. */
static __always_inline bool is_node_port(const struct frontend_key *asked, u64 netns)
{
	if (is_loopback(asked->address)) {
		if (!has_loopback_node_ports(asked->address, netns))
			return false;
	} else if (!is_unspecified(asked->address) && !has_node_ports(asked->address)) {
		return false;
	}
	return find_node_port(asked) != NULL;
}

/* A port that the kernel is left to choose is not looked at: it chooses again, where it must. */
static __always_inline int on_bind(struct bpf_sock_addr *ctx, bool v6)
{
	u64 netns = bpf_get_netns_cookie(ctx);
	struct frontend_key asked = {};
	bool taken;

	if (!is_host(netns) || already_refused())
		return 1;
	read_address(ctx, v6, asked.address, &asked.port);
	if (!asked.port)
		return 1;
	asked.protocol = ctx->protocol;
	taken = is_node_port(&asked, netns);
	if (!taken && !asked.address[2] && is_unspecified(asked.address)) {
		/* `::` takes IPv4 in as well, unless the socket forbids it; that cannot be seen. */
		asked.address[2] = bpf_htonl(0xffff);
		taken = is_node_port(&asked, netns);
	}
	if (!taken)
		return 1;
	refuse(EADDRINUSE); /* before 5.18 it is EPERM */
	return 0;
}

int connect4(struct bpf_sock_addr *ctx)
{
	return on_connect(ctx, false);
}

int connect6(struct bpf_sock_addr *ctx)
{
	return on_connect(ctx, true);
}

int sendmsg4(struct bpf_sock_addr *ctx)
{
	return on_sendmsg(ctx, false);
}

int sendmsg6(struct bpf_sock_addr *ctx)
{
	return on_sendmsg(ctx, true);
}

int recvmsg4(struct bpf_sock_addr *ctx)
{
	return on_recvmsg(ctx, false);
}

int recvmsg6(struct bpf_sock_addr *ctx)
{
	return on_recvmsg(ctx, true);
}

int getpeername4(struct bpf_sock_addr *ctx)
{
	return on_getpeername(ctx, false);
}

int getpeername6(struct bpf_sock_addr *ctx)
{
	return on_getpeername(ctx, true);
}

int bind4(struct bpf_sock_addr *ctx)
{
	return on_bind(ctx, false);
}

int bind6(struct bpf_sock_addr *ctx)
{
	return on_bind(ctx, true);
}

int sock_release(struct bpf_sock *ctx)
{
	u64 cookie;

	if (ctx->protocol != IPPROTO_UDP)
		return 1;
	cookie = bpf_get_socket_cookie(ctx);
	udp_conn.delete(&cookie);
	return 1;
}
