"""A measured run: the loop, queues of devices, finals, progress."""
