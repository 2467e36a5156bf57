// The JSON scanner, the keys of prompts, and the scanner of chunked streams, as Python sees them. A JSON scan keeps the bytes that it is of, and makes Python objects of what is asked for only.
#include <nanobind/stl/string_view.h>

#include <algorithm>

#include "bind_casters.hpp"
#include "scan/chain.hpp"
#include "scan/chunks.hpp"
#include "scan/scan.hpp"

namespace kvxfer {
namespace {

// Longer bodies are looked at without the GIL. 16 KiB take a few microseconds; to get the GIL back from a thread that computes in
// Python can take 5 ms.
constexpr size_t kHeldGilBytes = 16 << 10;

[[noreturn]] void raise(const char* kind, const std::string& text, std::optional<size_t> offset) {
  const nb::object type = nb::module_::import_("kvxfer.errors").attr(kind);
  const nb::object error = offset ? type(text, nb::arg("offset") = *offset) : type(text);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

void check_fault(const JsonFault& fault, std::string_view body) {
  if (fault.what == nullptr) return;
  const auto offset = static_cast<size_t>(fault.at - body.data());
  const char* const said = fault.kind == JsonFaultKind::Invalid       ? "the body is not valid JSON: "
                           : fault.kind == JsonFaultKind::NotAnObject ? "the body must be a JSON object: "
                                                                      : "the body is too complex: ";
  raise(fault.kind == JsonFaultKind::TooComplex ? "JsonTooComplexError" : "InvalidJsonError",
        said + std::string(fault.what) + " at byte " + std::to_string(offset), offset);
}

nb::str text_of(const std::string& utf8) {
  PyObject* text = PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "surrogatepass");
  if (text == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(text);
}

nb::object number_of(const std::string& text) {
  const bool is_integer = text.find_first_of(".eE") == std::string::npos;
  // Where too large for a double, infinite, as json.loads has it.
  PyObject* number = is_integer ? PyLong_FromString(text.c_str(), nullptr, 10) : PyFloat_FromDouble(PyOS_string_to_double(text.c_str(), nullptr, nullptr));
  if (number == nullptr || PyErr_Occurred() != nullptr) throw nb::python_error();
  return nb::steal(number);
}

struct EventChunks {
  std::vector<std::string> marks;
};

class PyJsonScan {
 public:
  PyJsonScan(nb::object fields, nb::bytes body) : owner_(std::move(fields)), fields_(nb::cast<const JsonFields&>(owner_)), body_(std::move(body)) {
    const std::string_view text = view(body_);
    JsonFault fault;
    if (text.size() > kHeldGilBytes) {
      nb::gil_scoped_release release;
      fault = scan_object(text, fields_, scan_);
    } else {
      fault = scan_object(text, fields_, scan_);
    }
    check_fault(fault, text);
  }

  nb::bytes body() const { return body_; }
  std::string_view text() const { return view(body_); }
  const JsonFields& fields() const { return fields_; }
  const JsonScan& scan() const { return scan_; }
  size_t open() const { return scan_.open; }
  size_t member_count() const { return scan_.members.size(); }

  // The member that counts; null: there is none.
  const JsonMember* last(std::string_view name) const {
    const uint16_t field = fields_.find(name);
    if (field == kNoField) raise("InvalidArgumentError", "'" + std::string(name) + "' is none of the fields that the body was scanned for", std::nullopt);
    return scan_.last[field] == kNoMember ? nullptr : &scan_.members[scan_.last[field]];
  }

  std::string_view value_text(const JsonMember& member) const { return view(body_).substr(member.value_begin, member.value_end - member.value_begin); }

  nb::object scalar(std::string_view name) const {
    const JsonMember* member = last(name);
    if (member == nullptr) return nb::none();
    const std::string_view text = value_text(*member);
    switch (member->kind) {
      case JsonKind::String: return text_of(decoded_string(text.substr(1, text.size() - 2)));
      case JsonKind::Number: return number_of(std::string(text));
      case JsonKind::True: return nb::bool_(true);
      case JsonKind::False: return nb::bool_(false);
      case JsonKind::Null: return nb::none();
      case JsonKind::Object:
      case JsonKind::Array: break;
    }
    raise("InvalidArgumentError", "'" + std::string(name) + "' is an object or an array, not one value", std::nullopt);
  }

  nb::list members() const {
    nb::list all;
    for (const JsonMember& m : scan_.members)
      all.append(nb::make_tuple(text_of(name_of(view(body_), m)), m.kind, nb::make_tuple(m.key_begin, m.key_end), nb::make_tuple(m.value_begin, m.value_end)));
    return all;
  }

  std::pair<std::vector<std::pair<size_t, size_t>>, bool> without_names(const std::vector<std::string>& names) const {
    std::vector<bool> is_removed(scan_.members.size());
    for (size_t i = 0; i < is_removed.size(); ++i) {
      const JsonMember& member = scan_.members[i];
      const std::string name = member.field == kNoField ? name_of(view(body_), member) : fields_.names()[member.field];
      is_removed[i] = std::find(names.begin(), names.end(), name) != names.end();
    }
    JsonRest rest = without(view(body_), scan_, is_removed);
    return {std::move(rest.ranges), rest.has_members};
  }

 private:
  nb::object owner_;  // of `fields_`
  const JsonFields& fields_;
  nb::bytes body_;
  JsonScan scan_;
};

nb::bytes words_of(const std::vector<uint64_t>& words) { return nb::bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof words[0]); }

// What is hashed of a body is fixed here, once: the members of the root, and the fields that the chain consists of.
class PyChainHasher {
 public:
  PyChainHasher(const std::array<uint8_t, 16>& secret, nb::object fields, const std::vector<std::string>& root, const std::vector<std::string>& heads)
      : secret_(secret), owner_(std::move(fields)), fields_(nb::cast<const JsonFields&>(owner_)) {
    for (const std::string& name : root) root_.push_back(numbered(name));
    for (const std::string& name : heads) heads_.push_back(numbered(name));
  }

  uint64_t root(const PyJsonScan& scan, const std::vector<nb::bytes>& texts) const {
    std::vector<std::string_view> given;
    for (const nb::bytes& text : texts) given.push_back(view(text));
    return beside(scan, [&] {
      std::vector<PromptPart> members;
      for (const uint16_t field : root_) {
        if (scan.scan().last[field] == kNoMember) continue;
        for (const JsonMember& member : scan.scan().members) {
          if (member.field == field && member.kind != JsonKind::Null) members.push_back(part_of(scan, member));
        }
      }
      return root_key(secret_, given, members);
    });
  }

  nb::tuple chain(const PyJsonScan& scan, uint64_t root, std::string_view name, bool is_list_of_prompts) const {
    const uint16_t field = numbered(name);
    const PromptChain chain = beside(scan, [&] {
      std::vector<PromptPart> parts;
      const auto add = [&](uint16_t number, PromptForm form) {
        const uint16_t last = scan.scan().last[number];
        if (last == kNoMember || scan.scan().members[last].kind == JsonKind::Null) return;
        parts.push_back(part_of(scan, scan.scan().members[last]));
        parts.back().form = form;
      };
      for (const uint16_t head : heads_) add(head, PromptForm::Items);
      add(field, is_list_of_prompts ? PromptForm::Prompts : PromptForm::Items);
      return prompt_chain(secret_, root, parts);
    });
    return nb::make_tuple(words_of(chain.keys), words_of(chain.sizes));
  }

 private:
  uint16_t numbered(std::string_view name) const {
    const uint16_t field = fields_.find(name);
    if (field == kNoField) raise("InvalidArgumentError", "'" + std::string(name) + "' is none of the fields that bodies are scanned for", std::nullopt);
    return field;
  }
  PromptPart part_of(const PyJsonScan& scan, const JsonMember& member) const {
    return {fields_.names()[member.field], scan.value_text(member)};
  }
  // What `act` returns, found without the GIL for a long body. `act` makes no Python object.
  template <class Act>
  auto beside(const PyJsonScan& scan, Act&& act) const -> decltype(act()) {
    if (&scan.fields() != &fields_) raise("InvalidArgumentError", "the body was scanned with other fields", std::nullopt);
    if (scan.text().size() <= kHeldGilBytes) return act();
    nb::gil_scoped_release release;
    return act();
  }

  SipSecret secret_;
  nb::object owner_;  // of `fields_`
  const JsonFields& fields_;
  std::vector<uint16_t> root_, heads_;
};

}  // namespace

void bind_scan(nb::module_& m) {
  nb::enum_<JsonKind>(m, "JsonKind")
      .value("STRING", JsonKind::String)
      .value("NUMBER", JsonKind::Number)
      .value("OBJECT", JsonKind::Object)
      .value("ARRAY", JsonKind::Array)
      .value("TRUE", JsonKind::True)
      .value("FALSE", JsonKind::False)
      .value("NULL", JsonKind::Null);
  using Span = std::pair<size_t, size_t>;
  nb::class_<PyJsonScan>(m, "JsonScan", "A JSON object that was looked at once. Of a name that occurs more than once the last occurrence counts.")
      .def_prop_ro("body", &PyJsonScan::body)
      .def_prop_ro("open", &PyJsonScan::open, "The offset of the object's brace.")
      .def("__len__", &PyJsonScan::member_count, "How many members there are, each occurrence of a name counted.")
      .def("kind", [](const PyJsonScan& self, std::string_view name) {
             const JsonMember* member = self.last(name);
             return member == nullptr ? std::nullopt : std::optional(member->kind);
           }, nb::arg("name"), "The kind of a field's value; None where the body has no such field.")
      .def("span", [](const PyJsonScan& self, std::string_view name) {
             const JsonMember* member = self.last(name);
             return member == nullptr ? std::nullopt : std::optional(Span(member->value_begin, member->value_end));
           }, nb::arg("name"), "Where a field's value begins and ends; None where the body has no such field.")
      .def("scalar", &PyJsonScan::scalar, nb::arg("name"), nb::sig("def scalar(self, name: str) -> str | int | float | bool | None"),
           "The value of a field that is a string, a number, true or false; None where it is null or absent. InvalidArgumentError for others.")
      .def("members", &PyJsonScan::members, nb::sig("def members(self) -> list[tuple[str, JsonKind, tuple[int, int], tuple[int, int]]]"),
           "Every member in the body's order: decoded name, kind, and where its key and its value begin and end.")
      .def("without", &PyJsonScan::without_names, nb::arg("names"),
           "The ranges of the body that stay when every occurrence of the named members goes, the first one from behind the object's brace; and\n"
           "whether any member stays.");
  nb::class_<JsonFields>(m, "JsonFields", "Names of members to look for in JSON objects, prepared once.")
      .def("__init__",
           [](JsonFields* self, const std::vector<std::string>& names) {
             if (names.size() > kFieldsMax) raise("LimitExceededError", "more than " + std::to_string(kFieldsMax) + " names of fields", std::nullopt);
             new (self) JsonFields(names);
           },
           nb::arg("names"))
      .def_prop_ro("names", &JsonFields::names)
      .def("scan", [](nb::object self, nb::bytes body) { return new PyJsonScan(std::move(self), std::move(body)); }, nb::arg("body"),
           nb::sig("def scan(self, body: bytes) -> JsonScan"),
           "Validates the whole body and finds its members, without the GIL where it is longer than JSON_HELD_GIL_BYTES. Raises InvalidJsonError\n"
           "with the offset of the first wrong byte, JsonTooComplexError where a bound is passed.");
  m.def("check_json", [](nb::bytes text) {
          const JsonFault fault = check_value(view(text));
          if (fault.what != nullptr) raise("InvalidArgumentError", std::string("not a JSON value: ") + fault.what, std::nullopt);
        }, nb::arg("text"), "Raises InvalidArgumentError unless `text` is one JSON value.");
  nb::class_<PyChainHasher>(m, "ChainHasher", "Finds the keys of prompts: hashes, keyed with a secret, of what their JSON says. Prepared once for a route.")
      .def(nb::init<const std::array<uint8_t, 16>&, nb::object, const std::vector<std::string>&, const std::vector<std::string>&>(), nb::arg("secret"),
           nb::arg("fields"), nb::arg("root"), nb::arg("heads"),
           nb::sig("def __init__(self, secret: bytes, fields: JsonFields, root: Sequence[str], heads: Sequence[str]) -> None"),
           "`secret` has 16 bytes. `root`: the fields that a root is made of; `heads`: those that stand in front of the prompt. Raises\n"
           "InvalidArgumentError for a name that `fields` has not.")
      .def("root", &PyChainHasher::root, nb::arg("scan"), nb::arg("texts"),
           "One key of some texts in their order, and of every occurrence of the root's fields that is not null.")
      .def("chain", &PyChainHasher::chain, nb::arg("scan"), nb::arg("root"), nb::arg("name"), nb::arg("is_list_of_prompts"),
           nb::sig("def chain(self, scan: JsonScan, root: int, name: str, is_list_of_prompts: bool) -> tuple[bytes, bytes]"),
           "The keys of the heads and of the prompt in field `name`, and for each the bytes of content up to it; both as 64-bit words of this\n"
           "machine. Without the GIL where the body is longer than JSON_HELD_GIL_BYTES.");
  m.def("siphash", [](const std::array<uint8_t, 16>& secret, nb::bytes data) { return siphash(SipSecret(secret), data.c_str(), data.size()); }, nb::arg("secret"),
        nb::arg("data"), "SipHash-2-4 with 64 bits.");
  nb::class_<EventChunks>(m, "EventChunks", "Finds out whether bytes of a chunked HTTP/1.1 body can be passed on as they came. Marks are prepared once.")
      .def("__init__",
           [](EventChunks* self, const std::vector<nb::bytes>& marks) {
             std::vector<std::string> texts;
             for (const nb::bytes& mark : marks) {
               if (mark.size() == 0) raise("InvalidArgumentError", "an empty mark occurs everywhere", std::nullopt);
               texts.emplace_back(view(mark));
             }
             new (self) EventChunks{std::move(texts)};
           },
           nb::arg("marks"))
      .def("body_bytes", [](const EventChunks& self, nb::bytes data) { return whole_event_bytes(view(data), self.marks); }, nb::arg("data"),
           "How many bytes of body `data` has, where it is whole chunks of whole events in which no mark occurs; otherwise 0. The last\n"
           "chunk, of size 0, and chunk extensions are never among them.");
  m.attr("JSON_DEPTH_MAX") = kDepthMax;
  m.attr("JSON_MEMBERS_MAX") = kMembersMax;
  m.attr("JSON_INTEGER_DIGITS_MAX") = kIntegerDigitsMax;
  m.attr("JSON_HELD_GIL_BYTES") = kHeldGilBytes;
  m.attr("CHAIN_BYTES") = kChainBytes;
  m.attr("CHAIN_ID_BYTES") = kChainIdBytes;
  m.attr("CHAIN_KEYS_MAX") = kChainKeysMax;
}

}  // namespace kvxfer
