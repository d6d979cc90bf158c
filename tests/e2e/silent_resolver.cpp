// Stands in for the C library's resolver by LD_PRELOAD: hosts named *.quiet are this machine, until the file named by
// QUIET_FROM_NOW_ON is there; from then on a look-up of one never ends, as with a resolver that drops packets.
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

#include <cstdlib>

extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints, addrinfo** found) {
  typedef int (*Resolver)(const char*, const char*, const addrinfo*, addrinfo**);
  static Resolver real = reinterpret_cast<Resolver>(dlsym(RTLD_NEXT, "getaddrinfo"));
  size_t length = host ? strlen(host) : 0;
  if (length < 6 || strcmp(host + length - 6, ".quiet")) return real(host, service, hints, found);
  while (access(getenv("QUIET_FROM_NOW_ON"), F_OK) == 0) pause();
  return real("127.0.0.1", service, hints, found);
}
