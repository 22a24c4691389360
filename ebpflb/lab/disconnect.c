// SPDX-License-Identifier: Apache-2.0
/*
 * Takes a connected socket's peer away: connect() to AF_UNSPEC, which Python cannot say.
 *
 * usage: disconnect FD        a socket that is inherited; exit code 0, or the errno
 *
 * It is a program of its own, not an extension, so that nobody who does not test this needs a
 * compiler. It must know nothing of the lab.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

int main(int argc, char **argv)
{
	struct sockaddr address;

	if (argc != 2)
		return EINVAL;
	memset(&address, 0, sizeof(address));
	address.sa_family = AF_UNSPEC;
	return connect(atoi(argv[1]), &address, sizeof(address)) ? errno : 0;
}
