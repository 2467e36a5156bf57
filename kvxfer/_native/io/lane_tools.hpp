// What lanes need besides sockets, once per core: copying threads, the UCX worker, pinned memory. Made before the IO thread starts;
// after that only the thread that runs the event loop touches them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "lanes/copy.hpp"
#include "lanes/splice.hpp"
#include "lanes/staging.hpp"
#include "lanes/ucx_worker.hpp"
#include "tls_channel.hpp"

namespace kvxfer {

constexpr size_t kScratchBytes = 256 * 1024;

struct LaneTools {
  std::shared_ptr<Copier> copier;
  std::unique_ptr<UcxWorker> ucx;  // null: that lane is off
  std::unique_ptr<Staging> staging;
  SplicePipes pipes;
  std::shared_ptr<const Encryption> encryption = std::make_shared<Encryption>(EncryptionOptions{});  // never null
  TlsBuffers tls;
  // Holds bytes for a decoder, or bytes to throw away.
  std::unique_ptr<uint8_t[]> scratch{new uint8_t[kScratchBytes]};
};

}  // namespace kvxfer
