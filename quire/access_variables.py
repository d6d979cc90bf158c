"""Names of the variables by which every caller knows its key and its servers' certificates. Loads nothing."""

API_KEY = "QUIRE_API_KEY"  # of a server: the keys that it accepts, too
TLS_ROOT = "QUIRE_TLS_ROOT"
TLS_SERVER_NAME = "QUIRE_TLS_SERVER_NAME"
