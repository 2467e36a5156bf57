// The reader's side of the `ucx` lane: the memory that a peer's MAPs gave, and one read out of it.
//
// Runs that touch on both sides become one get. The number and the bytes of the gets in flight to one peer are bounded, and the
// reads in progress share these bounds evenly. So a read that ends drains soon, and no read waits for another. After its last get a
// read posts one flush; the read is done when the flush has completed.
#pragma once

#include "ucx_worker.hpp"

namespace kvxfer {

// The UCX worker at the other end of a session. The first read connects to it; after a failure, the first read after a pause does.
class UcxPeer {
 public:
  UcxPeer(UcxWorker& worker, std::string address) : worker_(worker), address_(std::move(address)) {}
  UcxPeer(const UcxPeer&) = delete;
  UcxPeer& operator=(const UcxPeer&) = delete;
  // The session has ended: closes the endpoint, which cancels the gets in flight.
  ~UcxPeer();

  UcxWorker& worker() const { return worker_; }
  const std::string& address() const { return address_; }
  // Throws Error(no_lane).
  const std::shared_ptr<UcxEndpoint>& endpoint();

 private:
  UcxWorker& worker_;
  const std::string address_;
  std::shared_ptr<UcxEndpoint> endpoint_;
  Nanos retry_at_ = 0;
  std::string failure_;  // of the last attempt
};

class UcxRemote final : public RemoteMemory {
 public:
  // Throws Error(no_lane).
  UcxRemote(std::shared_ptr<UcxPeer> peer, const Map& map, std::string packed);
  std::unique_ptr<ReadJob> open(ReadBlocks read, RemotePlace from, OwnMemory to) const override;

 private:
  const std::shared_ptr<const UcxKey>& key() const;

  const std::shared_ptr<UcxPeer> peer_;
  const std::string packed_;
  mutable std::shared_ptr<const UcxKey> key_;  // on the peer's present endpoint
};

class UcxRead final : public ReadJob {
 public:
  // `keys`: of all memory that `from` names, on one endpoint.
  UcxRead(UcxWorker& worker, ReadBlocks read, RemotePlace from, std::vector<std::shared_ptr<const UcxKey>> keys, OwnMemory to);
  ~UcxRead() override { end_posting(); }

  // Throws only when nothing is in flight any more.
  size_t read(size_t max) override;
  bool is_done() const override { return flight_->is_flushed && !is_in_flight() && !has_failed() && checked_ == bytes(); }
  bool is_in_flight() const override { return flight_->requests != 0; }

 private:
  void post();
  void end_posting();
  bool is_posted() const { return to_span_.size == 0 && to_.is_done(); }
  bool has_failed() const { return flight_->failure != ucp::kOk || flight_->endpoint->is_failed() || !refusal_.empty(); }
  [[noreturn]] void fail() const;
  const UcxKey* key_at(uint64_t address);
  void find_memories();
  const UcxMemory* memory_at(const uint8_t* address);

  UcxWorker& worker_;
  const std::shared_ptr<UcxFlight> flight_;
  BlockWalk from_, to_;
  BlockWalk::Span from_span_, to_span_;  // taken from the walks, not yet posted
  const UcxKey* key_ = nullptr;          // the last used
  const UcxMemory* memory_ = nullptr;
  std::string refusal_;                  // why this lane cannot do this read, as this class found; empty: it can
  bool is_posting_ = true;               // gets are still to be posted
  uint64_t told_ = 0;                    // bytes landed, as of the last read()
  uint64_t checked_ = 0;                 // bytes that read() has returned: landed and, with checksums, verified
};

}  // namespace kvxfer
