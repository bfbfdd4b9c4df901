"""What is known of devices: the machine a run was made on, what it can do at most, and what its kernels' names say."""
