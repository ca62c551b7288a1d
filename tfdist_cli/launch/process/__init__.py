"""Processes on this machine: start, output, ports, network, memory and exit."""
