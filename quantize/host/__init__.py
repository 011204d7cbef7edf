"""What any program needs of its machine: files, progress, locks, processes, memory."""
