"""What a process needs of the operating system: children, signals, memory, heartbeats."""
