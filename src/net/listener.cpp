// Listener: an abstract unix socket with a name of 128 random bits.
#include <sys/socket.h>

#include <array>

#include "base/error.hpp"
#include "net/mesh.hpp"
#include "net/socket.hpp"

namespace zcomm::net {

namespace {

std::string random_name() {
  std::array<std::byte, 16> bytes;
  fill_random(bytes);
  std::string name = "@zcomm-";
  for (const std::byte byte : bytes) {
    constexpr char digits[] = "0123456789abcdef";
    name += digits[std::to_integer<int>(byte) >> 4];
    name += digits[std::to_integer<int>(byte) & 15];
  }
  return name;
}

}  // namespace

Listener::Listener() : address_(random_name()) {
  fd_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd_) throw_system_error(errno, "cannot make a unix socket to listen on");
  const Address address = parse_address(address_);
  if (::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address.socket), address.nbytes) != 0 ||
      ::listen(fd_.get(), SOMAXCONN) != 0) {
    throw_system_error(errno, text("cannot listen on the abstract unix socket ", address_));
  }
}

Listener::Listener(Listener&&) noexcept = default;
Listener& Listener::operator=(Listener&&) noexcept = default;
Listener::~Listener() = default;

}  // namespace zcomm::net
