"""The demo model: a grammar of small stories, and the script that trains a small model on them."""
