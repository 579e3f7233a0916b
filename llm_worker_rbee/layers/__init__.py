"""The parts of a decoder block, one file each, each testable alone. They call ops and touch no array library."""
