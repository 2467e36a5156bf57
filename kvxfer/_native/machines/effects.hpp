// What the machines ask of their shell. A machine never acts: it appends effects, in order, and the shell performs them.
#pragma once

#include "frames.hpp"

namespace kvxfer {

enum class GrantState : uint8_t { Alive, Released, Expired, Revoked, ReaderGone };
enum class TransferState : uint8_t { Connecting, Waiting, Reading, Confirming, Committed, Failed, Cancelled };
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
struct SendMap {  // send the MAP frame of `pool` with its descriptor
  SessionId session;
  uint32_t pool;
};
struct SendData {  // send `frame` and the bytes of `blocks`; answer with Endpoint::data_sent once the kernel took the last byte
  SessionId session;
  Data frame;
  uint32_t pool;
  std::vector<uint32_t> blocks;
};
struct ReadBlocks {  // read peer blocks `from` into own blocks `to`; answer with Endpoint::read_landed or read_failed
  TransferId id;
  uint64_t token;
  SessionId session;
  uint32_t remote_pool;
  std::vector<uint32_t> from;
  uint32_t pool;
  std::vector<uint32_t> to;
};

// --- towards the owner ---
struct GrantEnded {  // exactly once a grant
  TransferId id;
  GrantState state;
};
struct TransferProgress {
  TransferId id;
  TransferState state;
  uint32_t done, total;
};
struct TransferFinal {  // exactly once a transfer
  TransferId id;
  TransferState state;
  Code code;
  std::string text;
  Lane lane;  // the last one tried
  std::string lane_notes;  // why earlier lanes were given up; empty where the first one served
  uint32_t attempts;
  uint32_t blocks_done;
  uint32_t blocks_before_complete;  // landed before the source had announced everything
  Nanos queue_ns, wire_ns, confirm_ns;  // posted to first read; sum of the reads; last byte to verdict
};
struct TransferDrained {  // exactly once, never before TransferFinal: the destination blocks are the owner's again
  TransferId id;
};
struct NotifReceived {
  AgentRef from;
  uint64_t seq;
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

using Effect = std::variant<Dial, Hangup, SendFrame, SendMap, SendData, ReadBlocks, GrantEnded, TransferProgress, TransferFinal,
                            TransferDrained, NotifReceived, NotifDelivered, NotifFailed, SessionUp>;
using Effects = std::vector<Effect>;

}  // namespace kvxfer
