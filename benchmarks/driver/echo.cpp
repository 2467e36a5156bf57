// A server that does as little as one can: every POST is answered with an event stream of so many tokens, a usage and
// [DONE], at once or paced; every GET with a list of one model. One thread, one epoll. It is what a load driver's own
// cost is measured against, so it must never be what limits a run.
//
//     echo [--tokens 32] [--first-ms 0] [--gap-ms 10]    prints its port; ends with its parent

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

int tokens = 32;
long long first_ns = 0, gap_ns = 10'000'000;

long long now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

std::string framed(const std::string& data) {
  char size[32];
  std::snprintf(size, sizeof size, "%zx\r\n", data.size());
  return size + data + "\r\n";
}

// What a stream is made of, for completions and for chat.
struct Texts {
  std::string head, token, last;

  explicit Texts(bool chat) {
    const std::string object = chat ? "chat.completion.chunk" : "text_completion";
    const std::string start = "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"" + object +
                              "\",\"created\":1700000000,\"model\":\"echo\",\"choices\":[";
    const std::string text = chat ? "\"delta\":{\"content\":\" token\"}" : "\"text\":\" token\"";
    const std::string none = chat ? "\"delta\":{}" : "\"text\":\"\"";
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    token = framed(start + "{\"index\":0," + text + ",\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n");
    const std::string count = std::to_string(tokens);
    last = framed(start + "{\"index\":0," + none + ",\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":null}\n\n" +
                  start + "],\"usage\":{\"prompt_tokens\":16,\"total_tokens\":48,\"completion_tokens\":" + count +
                  "}}\n\ndata: [DONE]\n\n") +
           "0\r\n\r\n";
  }
};

struct Client {
  std::string in, out;
  unsigned generation = 0, watched = EPOLLIN;
  int left = 0;
  bool chat = false, streaming = false;
};

struct Due {
  long long at_ns;
  int fd;
  unsigned generation;
  bool operator<(const Due& other) const { return at_ns > other.at_ns; }
};

std::unordered_map<int, Client> clients;
std::priority_queue<Due> dues;
unsigned generations = 0;
int poller = -1;

void close_client(int fd) {
  clients.erase(fd);
  close(fd);
}

void flush(int fd, Client& client) {
  while (!client.out.empty()) {
    const ssize_t count = send(fd, client.out.data(), client.out.size(), MSG_NOSIGNAL);
    if (count < 0) {
      if (errno != EAGAIN) client.out.clear();
      break;
    }
    client.out.erase(0, static_cast<size_t>(count));
  }
  epoll_event event{};
  event.events = client.out.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
  event.data.fd = fd;
  if (client.watched != event.events) {
    client.watched = event.events;
    epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event);
  }
}

void step(int fd, Client& client, long long at_ns, const Texts texts[2]) {
  const Texts& said = texts[client.chat];
  if (!client.streaming) {
    client.streaming = true;
    client.out += said.head;
  }
  do {
    client.out += said.token;
  } while (--client.left > 0 && gap_ns == 0);
  if (client.left == 0) {
    client.out += said.last;
    client.streaming = false;
  } else {
    dues.push({at_ns + gap_ns, fd, client.generation});
  }
  flush(fd, client);
}

// Requests that are whole; a body is not looked at.
void take(int fd, Client& client, const Texts texts[2]) {
  for (;;) {
    const size_t end = client.in.find("\r\n\r\n");
    if (end == std::string::npos) return;
    size_t length = 0;
    for (size_t line = client.in.find("\r\n"); line < end; line = client.in.find("\r\n", line + 2)) {
      if (strncasecmp(client.in.c_str() + line + 2, "content-length:", 15) == 0)
        length = std::strtoul(client.in.c_str() + line + 17, nullptr, 10);
    }
    if (client.in.size() < end + 4 + length) return;
    const bool is_post = client.in.compare(0, 5, "POST ") == 0;
    client.chat = client.in.substr(0, client.in.find("\r\n")).find("/chat/") != std::string::npos;
    client.in.erase(0, end + 4 + length);
    if (is_post) {
      client.left = tokens;
      const long long at_ns = now_ns() + first_ns;
      if (first_ns != 0)
        dues.push({at_ns, fd, client.generation});
      else
        step(fd, client, at_ns, texts);
    } else {
      const std::string body = "{\"object\":\"list\",\"data\":[{\"id\":\"echo\",\"object\":\"model\"}]}";
      client.out += "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: " +
                    std::to_string(body.size()) + "\r\n\r\n" + body;
      flush(fd, client);
    }
  }
}

}  // namespace

int main(int count, char** words) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_TIMERSLACK, 1000UL);
  for (int place = 1; place + 1 < count; place += 2) {
    const std::string name = words[place];
    const double value = std::atof(words[place + 1]);
    if (name == "--tokens") tokens = static_cast<int>(value);
    if (name == "--first-ms") first_ns = static_cast<long long>(value * 1e6);
    if (name == "--gap-ms") gap_ns = static_cast<long long>(value * 1e6);
  }
  const Texts texts[2] = {Texts(false), Texts(true)};
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 4096) != 0) return 1;
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  std::printf("%d\n", ntohs(address.sin_port));
  std::fflush(stdout);

  poller = epoll_create1(0);
  const int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  for (const int fd : {listener, timer}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
  }
  std::vector<char> buffer(1 << 20);
  epoll_event events[256];
  for (;;) {
    if (!dues.empty()) {
      itimerspec at{};
      at.it_value.tv_sec = dues.top().at_ns / 1'000'000'000;
      at.it_value.tv_nsec = dues.top().at_ns % 1'000'000'000;
      timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, nullptr);
    }
    const int ready = epoll_wait(poller, events, 256, -1);
    for (int place = 0; place < ready; ++place) {
      const int fd = events[place].data.fd;
      if (fd == timer) {
        unsigned long long expired = 0;
        (void)!read(timer, &expired, sizeof expired);
      } else if (fd == listener) {
        for (int one; (one = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK)) >= 0;) {
          const int on = 1;
          setsockopt(one, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
          clients[one].generation = ++generations;
          epoll_event event{};
          event.events = EPOLLIN;
          event.data.fd = one;
          epoll_ctl(poller, EPOLL_CTL_ADD, one, &event);
        }
      } else if (auto found = clients.find(fd); found != clients.end()) {
        Client& client = found->second;
        if (events[place].events & EPOLLOUT) flush(fd, client);
        const ssize_t got = recv(fd, buffer.data(), buffer.size(), 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) {
          close_client(fd);
        } else if (got > 0) {
          client.in.append(buffer.data(), static_cast<size_t>(got));
          take(fd, client, texts);
        }
      }
    }
    const long long now = now_ns();
    while (!dues.empty() && dues.top().at_ns <= now) {
      const Due due = dues.top();
      dues.pop();
      auto found = clients.find(due.fd);
      if (found != clients.end() && found->second.generation == due.generation) step(due.fd, found->second, due.at_ns, texts);
    }
  }
}
