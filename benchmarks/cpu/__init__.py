"""Speed and accuracy of computing on a CPU."""
