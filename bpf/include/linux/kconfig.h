/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * bcc compiles against a kernel's header tree. This folder stands in for one, so that a node
 * needs no kernel headers: bcc brings its own linux/bpf.h, and the programs need nothing else.
 */
#define CONFIG_BPF_SYSCALL 1
