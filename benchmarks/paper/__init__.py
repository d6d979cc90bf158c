"""The paper's evaluation again: the real scheduler in virtual time, and the systems it was compared with."""
