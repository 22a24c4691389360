// SPDX-License-Identifier: Apache-2.0
/*
 * Connects a TCP socket through io_uring and prints what came of it as one line of JSON.
 *
 * usage: uring_connect ADDRESS PORT [mapped]      "mapped": an IPv4 address on an AF_INET6 socket
 *
 *   {"errno": 0, "peer": ["10.96.0.1", 80], "line": "{...}"}       line: what the server said
 *   {"unsupported": "io_uring_setup: Function not implemented"}    no io_uring in this kernel
 *
 * Raw system calls and no liburing: the point is the kernel's path to connect(), which does not
 * pass through the system call of that name. One request, so no memory barrier is needed beside
 * the system call's own. It must know nothing of the lab.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

static int unsupported(const char *what)
{
	printf("{\"unsupported\": \"%s: %s\"}\n", what, strerror(errno));
	return 0;
}

/* Submits one connect and returns its result: 0 or -errno; 1 when there is no io_uring. */
static int ring_connect(int fd, const struct sockaddr *address, socklen_t length)
{
	struct io_uring_params params;
	struct io_uring_sqe *sqe;
	struct io_uring_cqe *cqe;
	char *submissions, *completions;
	unsigned int mask;
	int ring;

	memset(&params, 0, sizeof(params));
	ring = syscall(__NR_io_uring_setup, 2, &params);
	if (ring < 0)
		return unsupported("io_uring_setup"), 1;
	submissions = mmap(NULL, params.sq_off.array + params.sq_entries * sizeof(unsigned int),
			   PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
			   IORING_OFF_SQ_RING);
	completions = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof(*cqe),
			   PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
			   IORING_OFF_CQ_RING);
	sqe = mmap(NULL, params.sq_entries * sizeof(*sqe), PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
	if (submissions == MAP_FAILED || completions == MAP_FAILED || sqe == MAP_FAILED)
		return unsupported("mmap of the ring"), 1;

	memset(sqe, 0, sizeof(*sqe));
	sqe->opcode = IORING_OP_CONNECT;
	sqe->fd = fd;
	sqe->addr = (unsigned long)address;
	sqe->off = length;
	mask = *(unsigned int *)(submissions + params.sq_off.ring_mask);
	((unsigned int *)(submissions + params.sq_off.array))[0 & mask] = 0;
	*(unsigned int *)(submissions + params.sq_off.tail) += 1;

	if (syscall(__NR_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
		return unsupported("io_uring_enter"), 1;
	mask = *(unsigned int *)(completions + params.cq_off.ring_mask);
	cqe = (struct io_uring_cqe *)(completions + params.cq_off.cqes);
	return cqe[*(unsigned int *)(completions + params.cq_off.head) & mask].res;
}

/* Prints text as the inside of a JSON string. */
static void print_quoted(const char *text)
{
	for (; *text && *text != '\n'; text++)
		printf(*text == '"' || *text == '\\' ? "\\%c" : "%c", *text);
}

int main(int argc, char **argv)
{
	struct sockaddr_storage storage;
	struct sockaddr_in *in4 = (struct sockaddr_in *)&storage;
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&storage;
	struct timeval patience = { .tv_sec = 3 };
	char text[INET6_ADDRSTRLEN + 8] = "", line[2048] = "", mapped[64];
	socklen_t length;
	int fd, result;

	if (argc < 3)
		return 2;
	memset(&storage, 0, sizeof(storage));
	if (argc > 3 && !strchr(argv[1], ':')) {
		snprintf(mapped, sizeof(mapped), "::ffff:%s", argv[1]);
		argv[1] = mapped;
	}
	if (strchr(argv[1], ':')) {
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons(atoi(argv[2]));
		length = sizeof(*in6);
		if (inet_pton(AF_INET6, argv[1], &in6->sin6_addr) != 1)
			return 2;
	} else {
		in4->sin_family = AF_INET;
		in4->sin_port = htons(atoi(argv[2]));
		length = sizeof(*in4);
		if (inet_pton(AF_INET, argv[1], &in4->sin_addr) != 1)
			return 2;
	}
	fd = socket(storage.ss_family, SOCK_STREAM, 0);
	if (fd < 0)
		return 1;
	/* Also bounds connect(): the kernel waits as long as a send may take. */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));

	result = ring_connect(fd, (struct sockaddr *)&storage, length);
	if (result > 0)
		return 0;
	if (!result) {
		length = sizeof(storage);
		if (!getpeername(fd, (struct sockaddr *)&storage, &length)) {
			if (storage.ss_family == AF_INET6)
				inet_ntop(AF_INET6, &in6->sin6_addr, text, sizeof(text));
			else
				inet_ntop(AF_INET, &in4->sin_addr, text, sizeof(text));
		}
		if (read(fd, line, sizeof(line) - 1) < 0)
			line[0] = 0;
	}
	printf("{\"errno\": %d, \"peer\": [\"%s\", %d], \"line\": \"", -result, text,
	       ntohs(in4->sin_port));
	print_quoted(line);
	printf("\"}\n");
	return 0;
}
