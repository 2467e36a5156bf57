// What the machines ask of their shell. A machine performs nothing: it appends effects, in order, and the shell performs them.
#pragma once

#include "frames.hpp"

namespace kvxfer {

enum class GrantState : uint8_t { Alive, Released, Expired, Revoked, ReaderGone };
enum class TransferState : uint8_t { Connecting, Waiting, Granted, Reading, Confirming, Committed, Failed, Cancelled };
inline bool is_final(TransferState state) { return state >= TransferState::Committed; }

// --- towards the wire ---
struct Dial {  // connect to `peer`; answer with Endpoint::dialed or Endpoint::dial_failed
  AgentRef peer;
  SessionKind kind;
};
struct Hangup {  // close the connection after what was queued on it; answer with Endpoint::closed
  SessionId session;
  Code code;
  std::string text;
};
struct SendFrame {
  SessionId session;
  Frame frame;
};
struct SendMap {  // send, once per session, the MAP frame that lets the peer read pool or region `pool` by `lane`
  SessionId session;
  uint32_t pool;
  Lane lane;
};
// Send `frame` and the bytes of `from`, followed by their CRC-32Cs if frame.has_checksums; answer with Endpoint::data_sent once the
// kernel took the last byte. If the kernel took only references, the shell says so in `frame` (is_zero_copy) and in its answer. If
// the bytes cannot be read, it calls Endpoint::data_failed first, and sends zeros for the rest. `checksums`: of exactly these
// blocks if the owner's `ready` brought them, else empty: compute them.
struct SendData {
  SessionId session;
  Data frame;
  Extent from;
  std::vector<uint32_t> checksums;
  uint64_t serial = 0;  // of its grant: a peer may reuse the id for a later grant, once this one is forgotten
};
// Read the peer's `from` into own `to`; each element of `to` is as long as that of `from`. Answer with Endpoint::read_landed or
// read_stopped. `checksums`, if not empty: CRC-32Cs that the blocks must have, else read_stopped(checksum).
// read_stopped(memory_gone): memory of the peer, or of this agent, is unmapped, and a retry will find it so.
struct ReadBlocks {
  TransferId id;
  uint64_t token;
  SessionId session;
  Lane lane;
  Extent from, to;
  std::vector<uint32_t> checksums;
};

// The transfer of this read is final, and its bytes are no longer needed. The read is answered as usual, but may stop early.
struct StopRead {
  TransferId id;
};

// --- towards the owner ---
struct GrantEnded {  // exactly once a grant
  TransferId id;
  GrantState state;
};
// Only the owner's own pulls, fetches and pushes. A pull that a peer's push asked for ends in OfferEnded.
struct TransferProgress {
  TransferId id;
  TransferState state;
  uint32_t done, total;
};
struct TransferGranted {  // a pull heard that its grant exists; repeated after a lost session while it has no blocks
  TransferId id;
};
struct TransferFinal {  // exactly once a transfer
  TransferId id;
  TransferState state;
  Code code;
  std::string text;
  Lane lane;  // the last one tried
  std::string lane_notes;  // why earlier lanes were left; empty if the first one worked
  uint32_t attempts;
  uint32_t blocks_done;
  uint32_t blocks_before_complete;  // landed before the source had announced everything
  Nanos queue_ns, wire_ns, confirm_ns;  // posted to first read; sum of the reads; last byte to verdict
  uint32_t blocks_checked;  // matched the CRC-32C that their source sent
  SessionId session;        // its last frame came over it; 0: none
};
struct TransferDrained {  // exactly once, never before TransferFinal: the destination blocks are the owner's again
  TransferId id;
};
struct OfferEnded {  // a pull that a peer's push asked for is final, exactly once; nothing of it lands after this
  TransferId id;
  AgentRef from;
  TransferState state;
  Code code;
  Lane lane;
  uint64_t bytes;
};
struct NotifReceived {
  AgentRef from;
  uint64_t seq;  // 0: it came with a push, whose bytes are committed
  std::string payload;
};
struct NotifDelivered {
  AgentRef to;
  uint64_t seq;
};
struct NotifFailed {
  AgentRef to;
  uint64_t seq;
  Code code;
};
struct SessionUp {
  SessionId session;
  AgentRef peer;
  SessionKind kind;
};

using Effect = std::variant<Dial, Hangup, SendFrame, SendMap, SendData, ReadBlocks, StopRead, GrantEnded, TransferProgress,
                            TransferGranted, TransferFinal, TransferDrained, OfferEnded, NotifReceived, NotifDelivered, NotifFailed, SessionUp>;
using Effects = std::vector<Effect>;

}  // namespace kvxfer
