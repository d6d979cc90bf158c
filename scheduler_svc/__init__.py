"""The scheduler: owns requests, queues, block tables, token streams and the journal. Knows no tensor."""
