"""Processes of this machine: start, output, ports, network, memory, end."""
