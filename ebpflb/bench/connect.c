// SPDX-License-Identifier: Apache-2.0
/*
 * The benchmark's client and server: connects that are timed one by one, and listeners that cost
 * the client nothing. It dials numbers and must know nothing of Services, agents or maps; where a
 * process of it lives (namespace, cgroup) is decided by whoever starts it.
 *
 *   connect serve ID QUIET GREET SINK
 *                                    listens on three TCP ports of every address:
 *                                    QUIET's queue is emptied every 2 ms, so no connect() ever
 *                                    wakes this process; whoever comes to GREET is told ID, a byte;
 *                                    SINK swallows what one peer after another sends
 *   connect client                   reads commands, a line each:
 *     list I FILE                    destination list I: struct destination each
 *     run I N                        N connects along list I, from where the last run ended
 *     check I N                      N connects along list I, each answered by who it expects?
 *     stream I MS                    sends to the first of list I for so long
 *     watch A.B.C.D PORT OLD MS      connects until somebody else than OLD answers, MS at most
 *     stats on|off                   the kernel counts and times BPF programs meanwhile
 *
 * The answers, a line each: "ready" when it listens; "ok" to list and stats; to run "N FAILED
 * ERRNO" and then N raw samples; to check "N FAILED WRONG"; to stream "BYTES NS"; to watch first "watching" when OLD has answered once, then
 * "FIRST_NS ID DIALS OLD_AFTER FAILED", FIRST_NS being CLOCK_MONOTONIC when the first connect() to
 * somebody else returned, OLD_AFTER how many of the AFTER connects behind that went to OLD.
 *
 * Every connection is closed by a reset (SO_LINGER 0): no TIME_WAIT, no port runs out.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LISTS 6
#define MAX_DESTINATIONS (1U << 20)
#define MAX_SAMPLES 1000000U
#define BACKLOG 65535
#define DRAIN_MS 2
#define CONNECT_TIMEOUT_S 2
#define PAUSE_NS 300000 /* the agent needs a CPU, too */
#define AFTER 20
#define CHUNK (64 * 1024)

/* As the control plane packs it: network order. */
struct destination {
	uint32_t address;
	uint16_t port;
	uint8_t expected; /* who is to answer, for those that are asked */
	uint8_t pad;
};

/* Nanoseconds: of connect() alone, and from before socket() to behind close(). */
struct sample {
	uint32_t connect;
	uint32_t cycle;
};

struct list {
	struct destination *to;
	uint32_t size;
	uint32_t next;
};

static struct list lists[LISTS];
static struct sample samples[MAX_SAMPLES];
static int stats_fd = -1;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static void pause_ns(long ns)
{
	struct timespec t = { .tv_nsec = ns };

	nanosleep(&t, NULL);
}

/* --- server ---------------------------------------------------------------------------------- */

static int listen_on(uint16_t port)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) ||
	    bind(fd, (struct sockaddr *)&any, sizeof(any)) || listen(fd, BACKLOG))
		die("listen");
	return fd;
}

static void drain(int listener, const char *greeting)
{
	int fd;

	while ((fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
		if (greeting)
			send(fd, greeting, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
		close(fd);
	}
}

/* Until the peer has closed; nobody else is served meanwhile. */
static void swallow(int listener)
{
	static char chunk[CHUNK];
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

	if (fd < 0)
		return;
	while (recv(fd, chunk, sizeof(chunk), 0) > 0)
		;
	close(fd);
}

static int serve(char id, uint16_t quiet_port, uint16_t greet_port, uint16_t sink_port)
{
	int quiet = listen_on(quiet_port), greet = listen_on(greet_port);
	int sink = listen_on(sink_port);
	struct pollfd on[3] = { { .fd = greet, .events = POLLIN },
				{ .fd = 0 },
				{ .fd = sink, .events = POLLIN } };
	uint64_t drained = 0, now;

	puts("ready");
	fflush(stdout);
	for (;;) {
		if (poll(on, 3, DRAIN_MS) < 0 && errno != EINTR)
			die("poll");
		if (on[1].revents) /* standard input is closed: the benchmark has ended */
			return 0;
		if (on[0].revents)
			drain(greet, &id);
		if (on[2].revents)
			swallow(sink);
		now = now_ns();
		if (now - drained >= DRAIN_MS * 1000000ULL) {
			drain(quiet, NULL);
			drained = now;
		}
	}
}

/* --- client ---------------------------------------------------------------------------------- */

static int open_socket(void)
{
	struct linger reset = { .l_onoff = 1 };
	struct timeval timeout = { .tv_sec = CONNECT_TIMEOUT_S };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)) ||
	    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) ||
	    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)))
		die("socket");
	return fd;
}

static void load(unsigned int i, const char *path)
{
	FILE *file = fopen(path, "rb");
	struct list *list = &lists[i];

	if (!file)
		die(path);
	free(list->to);
	list->to = calloc(MAX_DESTINATIONS, sizeof(*list->to));
	if (!list->to)
		die("memory");
	list->size = fread(list->to, sizeof(*list->to), MAX_DESTINATIONS, file);
	list->next = 0;
	fclose(file);
	if (!list->size) {
		fprintf(stderr, "%s: no destinations\n", path);
		exit(1);
	}
	puts("ok");
}

static void run(struct list *list, uint32_t count)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	uint64_t begin, before, after, end;
	uint32_t failed = 0, i;
	int error = 0, fd;

	for (i = 0; i < count; i++) {
		const struct destination *next = &list->to[list->next];

		list->next = (list->next + 1) % list->size;
		to.sin_addr.s_addr = next->address;
		to.sin_port = next->port;
		begin = now_ns();
		fd = open_socket();
		before = now_ns();
		if (connect(fd, (struct sockaddr *)&to, sizeof(to))) {
			error = errno;
			failed++;
		}
		after = now_ns();
		close(fd);
		end = now_ns();
		samples[i].connect = after - before;
		samples[i].cycle = end - begin;
	}
	printf("%u %u %d\n", count, failed, error);
	fwrite(samples, sizeof(samples[0]), count, stdout);
}

/* Who answers, 0 where nobody does; *at is when connect() returned. */
static char ask(const struct sockaddr_in *to, uint64_t *at)
{
	int fd = open_socket();
	char id = 0;

	if (connect(fd, (const struct sockaddr *)to, sizeof(*to)) == 0) {
		*at = now_ns();
		if (recv(fd, &id, 1, 0) != 1)
			id = 0;
	}
	close(fd);
	return id;
}

static void check(struct list *list, uint32_t count)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	uint32_t failed = 0, wrong = 0, i;
	uint64_t at;
	char who;

	for (i = 0; i < count; i++) {
		const struct destination *next = &list->to[list->next];

		list->next = (list->next + 1) % list->size;
		to.sin_addr.s_addr = next->address;
		to.sin_port = next->port;
		who = ask(&to, &at);
		failed += !who;
		wrong += who && who != next->expected;
	}
	printf("%u %u %u\n", count, failed, wrong);
}

static void stream(const struct list *list, unsigned long ms)
{
	static char chunk[CHUNK];
	struct sockaddr_in to = { .sin_family = AF_INET,
				  .sin_addr.s_addr = list->to[0].address,
				  .sin_port = list->to[0].port };
	uint64_t begin, end, bytes = 0;
	int fd = open_socket();
	ssize_t sent;

	if (connect(fd, (struct sockaddr *)&to, sizeof(to)))
		die("stream");
	begin = now_ns();
	do {
		sent = send(fd, chunk, sizeof(chunk), MSG_NOSIGNAL);
		if (sent < 0)
			die("stream");
		bytes += sent;
		end = now_ns();
	} while (end - begin < ms * 1000000ULL);
	close(fd);
	printf("%llu %llu\n", (unsigned long long)bytes, (unsigned long long)(end - begin));
}

static void watch(const char *address, uint16_t port, char old, unsigned long ms)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
	uint64_t until = now_ns() + ms * 1000000ULL, first = 0, at = 0;
	unsigned int dials = 0, failed = 0, old_after = 0, left = AFTER;
	char id = 0, who = 0;

	if (inet_pton(AF_INET, address, &to.sin_addr) != 1)
		die(address);
	while (left && now_ns() < until) {
		who = ask(&to, &at);
		if (!dials++) {
			puts("watching");
			fflush(stdout);
		}
		if (!who) {
			failed++;
		} else if (first) {
			old_after += who == old;
			left--;
		} else if (who != old) {
			first = at;
			id = who;
		}
		pause_ns(PAUSE_NS);
	}
	printf("%llu %c %u %u %u\n", (unsigned long long)first, id ? id : '-', dials, old_after,
	       failed);
}

static void stats(bool on)
{
	union bpf_attr attr = { .enable_stats.type = BPF_STATS_RUN_TIME };

	if (stats_fd >= 0)
		close(stats_fd);
	stats_fd = on ? syscall(SYS_bpf, BPF_ENABLE_STATS, &attr, sizeof(attr)) : -1;
	if (on && stats_fd < 0)
		die("BPF_ENABLE_STATS");
	puts("ok");
}

static int client(void)
{
	char line[4096], text[4000], old;
	unsigned long ms;
	unsigned int i, n;

	memset(samples, 1, sizeof(samples)); /* no page fault while the clock runs */
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "list %u %3999s", &i, text) == 2 && i < LISTS)
			load(i, text);
		else if (sscanf(line, "run %u %u", &i, &n) == 2 && i < LISTS && lists[i].size &&
			 n <= MAX_SAMPLES)
			run(&lists[i], n);
		else if (sscanf(line, "check %u %u", &i, &n) == 2 && i < LISTS && lists[i].size)
			check(&lists[i], n);
		else if (sscanf(line, "stream %u %lu", &i, &ms) == 2 && i < LISTS && lists[i].size)
			stream(&lists[i], ms);
		else if (sscanf(line, "watch %3999s %u %c %lu", text, &n, &old, &ms) == 4)
			watch(text, n, old, ms);
		else if (sscanf(line, "stats %3999s", text) == 1)
			stats(!strcmp(text, "on"));
		else
			break;
		fflush(stdout);
	}
	return ferror(stdin) || !feof(stdin);
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "client"))
		return client();
	if (argc == 6 && !strcmp(argv[1], "serve"))
		return serve(argv[2][0], atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
	fprintf(stderr, "usage: connect client | connect serve ID QUIET GREET SINK\n");
	return 2;
}
