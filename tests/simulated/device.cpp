// A simulated accelerator, "sim", on torch's public headers. What it is for, and its limits: see __init__.py.
//
// Kernels run at once on the CPU, in the order of the calls. What a device would do later is kept in clocks: each stream
// counts what was put on it, and knows how far the others had come when it last waited for them. A read of something
// that is not known to be written is a race, and gets nonsense, as it might on a device. Only what waits for another
// process or thread is really pending: a stream with pending work lets nobody pass, and neither does a hardware queue
// whose first entry waits for something, as if streams that share the queue were one.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <set>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kPool = 32;                // streams of a device and priority, as torch has them for CUDA
constexpr int kStreams = 1 + 2 * kPool;  // of a device: the default one, those of low and those of high priority
constexpr int kPoison = 0x7f;            // such floats are no numbers that anybody computes with
constexpr auto kLongest = std::chrono::seconds(15);

int num_devices = 2;

using Clock = std::vector<uint64_t>;  // for each stream of all devices, how far it is known to have come
using Slot = size_t;                  // of a stream in clocks

Slot slot_of(int device, int64_t stream) { return device * kStreams + stream; }
void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}
std::string name_of(Slot s) {
  return "stream " + std::to_string(s % kStreams) + " of sim:" + std::to_string(s / kStreams);
}

// -- pending work: what waits for another process or thread -----------------------------------------------------------

struct Pending {
  std::string what, failure;
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;

  bool done() {
    std::lock_guard<std::mutex> lock(mutex);
    return is_done;
  }
  void finish(std::string error) {
    std::lock_guard<std::mutex> lock(mutex);
    is_done = true;
    failure = std::move(error);
    changed.notify_all();
  }
  void wait(const std::string& who) {
    std::unique_lock<std::mutex> lock(mutex);
    TORCH_CHECK(changed.wait_for(lock, kLongest, [&] { return is_done; }), who, " is stuck behind ", what);
    TORCH_CHECK(failure.empty(), what, " failed: ", failure);
  }
};
using Pendings = std::vector<std::shared_ptr<Pending>>;

void wait_for(const Pendings& pendings, const std::string& who) {  // without our locks
  if (pendings.empty()) return;
  std::optional<py::gil_scoped_release> released;
  if (PyGILState_Check()) released.emplace();
  for (const auto& pending : pendings) pending->wait(who);
}

// -- state ------------------------------------------------------------------------------------------------------------

struct Access {
  uint64_t tick;
  std::string what;
};
struct Block {
  int device;
  Slot home;  // the stream on which it was allocated
  size_t size, capacity;
  std::map<Slot, Access> writes{}, reads{};
  std::set<Slot> recorded{};
};
struct Free {
  void* memory;
  Pendings until;
};
struct LateUse {  // of memory that is freed, by a stream that the one of the memory has not waited for
  Slot stream;
  Access access;
  size_t size;
};
struct HostCopy {  // between pinned memory and a device: the host must leave the memory alone until it knows the copy done
  Slot stream;
  uint64_t tick;
  bool to_host;
  char* memory;
  std::vector<char> bytes;
  at::Tensor keep;
};
struct Held {  // memory that was freed, and is nobody's before the host knows that other streams have come so far
  int device;
  size_t size;
  std::vector<std::pair<Slot, uint64_t>> until;
};
struct Note {
  std::string kind, what;
};

std::recursive_mutex mutex_;  // of all below
std::vector<Clock> clocks_;   // of each stream
std::vector<Pendings> pendings_;
std::vector<Pendings> queues_;  // what the entries wait for that a hardware queue holds
int num_queues_ = 0;            // of a device; 0: each stream has its own
uint64_t stream_waits_ = 0;     // waits of streams for events
Clock host_;                  // what the host, any thread of it, knows to be done
std::map<char*, Block> blocks_;
std::map<std::pair<Slot, size_t>, std::vector<Free>> free_;
std::map<Slot, std::vector<LateUse>> late_uses_;  // by the stream of the memory
std::vector<HostCopy> copies_;
std::map<char*, size_t> pinned_;
std::vector<Held> held_;
int64_t now_[kMaxDevices], peak_[kMaxDevices], active_peak_[kMaxDevices];
int next_stream_[kMaxDevices][2];
py::object* listener_ = nullptr;

thread_local int device_ = 0;
thread_local int64_t streams_[kMaxDevices] = {};
thread_local int muted_ = 0;  // within a kernel: what torch does on the way is no work of a stream

class Lock {  // nobody waits for it with Python's lock, for which one who has it waits when a tensor of Python ends
 public:
  explicit Lock(std::recursive_mutex& mutex) : held_(mutex, std::try_to_lock) {
    if (held_.owns_lock()) return;
    PyThreadState* python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    held_.lock();
    if (python != nullptr) PyEval_RestoreThread(python);
  }

 private:
  std::unique_lock<std::recursive_mutex> held_;
};
struct Mute {
  Mute() { ++muted_; }
  ~Mute() { --muted_; }
};

Slot current(int device) { return slot_of(device, streams_[device]); }

void tell(const std::vector<Note>& notes) {  // without our lock: the listener is Python
  if (notes.empty() || listener_ == nullptr) return;
  py::gil_scoped_acquire gil;
  for (const auto& note : notes) (*listener_)(note.kind, note.what);
}

void add_pendings(Pendings& all, const Pendings& more) {
  for (const auto& pending : more)
    if (std::find(all.begin(), all.end(), pending) == all.end()) all.push_back(pending);
}

Pendings& queue_of(Slot s) {  // with the lock
  const auto number = s % kStreams;
  return queues_[s - number + (num_queues_ ? number % num_queues_ : number)];
}

Pendings pending_on(Slot s) {
  Lock lock(mutex_);
  for (auto* all : {&pendings_[s], &queue_of(s)})
    all->erase(std::remove_if(all->begin(), all->end(), [](auto& p) { return p->done() && p->failure.empty(); }), all->end());
  auto found = pendings_[s];
  add_pendings(found, queue_of(s));
  return found;
}

// -- clocks: what comes before what -----------------------------------------------------------------------------------

uint64_t put_on(Slot s) {  // with the lock
  join(clocks_[s], host_);
  return ++clocks_[s][s];
}

bool conflicts(const std::map<Slot, Access>& earlier, Slot s, const std::string& what, std::vector<Note>& notes) {
  bool found = false;
  for (const auto& [other, access] : earlier) {
    if (other == s || clocks_[s][other] >= access.tick) continue;
    notes.push_back({"race", what + " on " + name_of(s) + " does not wait for " + access.what + " on " + name_of(other)});
    found = true;
  }
  return found;
}

Block* block_of(const at::Tensor& t) {  // with the lock
  if (!t.defined() || t.device().type() != kSim || !t.has_storage() || t.storage().nbytes() == 0) return nullptr;
  auto it = blocks_.find(static_cast<char*>(const_cast<void*>(t.storage().data())));
  return it == blocks_.end() ? nullptr : &it->second;
}

bool reads(const at::Tensor& t, Slot s, const std::string& op, std::vector<Note>& notes) {  // whether it is a race
  auto* block = block_of(t);
  if (block == nullptr) return false;
  bool found = conflicts(block->writes, s, "a read by " + op, notes);
  block->reads[s] = {clocks_[s][s], "a read by " + op};
  return found;
}

void writes(const at::Tensor& t, Slot s, const std::string& op, std::vector<Note>& notes) {
  auto* block = block_of(t);
  if (block == nullptr) return;
  conflicts(block->writes, s, "a write by " + op, notes);
  conflicts(block->reads, s, "a write by " + op, notes);
  block->writes.clear();
  block->reads.clear();
  block->writes[s] = {clocks_[s][s], "a write by " + op};
}

bool knows(const Clock& clock) {  // the host
  Lock lock(mutex_);
  for (size_t s = 0; s < clock.size(); ++s)
    if (host_[s] < clock[s]) return false;
  return true;
}

void host_learns(const Clock& clock) {  // that a stream has come so far
  std::vector<Note> notes;
  std::vector<HostCopy> done;
  {
    Lock lock(mutex_);
    join(host_, clock);
    for (auto it = copies_.begin(); it != copies_.end();) {
      if (host_[it->stream] >= it->tick) {
        done.push_back(std::move(*it));
        it = copies_.erase(it);
      } else {
        ++it;
      }
    }
  }
  for (auto& copy : done) {
    if (copy.to_host) std::memcpy(copy.memory, copy.bytes.data(), copy.bytes.size());
    else if (std::memcmp(copy.memory, copy.bytes.data(), copy.bytes.size()) != 0)
      notes.push_back({"race", "pinned memory was written while it was copied to the device"});
  }
  tell(notes);
}

void host_waits(Slot s, const std::string& why) {
  wait_for(pending_on(s), "the host, which waits for " + name_of(s) + ",");
  Clock clock;
  {
    Lock lock(mutex_);
    clock = clocks_[s];
  }
  host_learns(clock);
  tell({{"wait", why}});
}

// -- memory: blocks are used again at once, by the stream that they belong to -----------------------------------------

int64_t active(int device) {  // bytes that are allocated or held; with the lock
  const auto known = [](const auto& tick) { return host_[tick.first] >= tick.second; };
  const auto over = [&](const Held& held) { return std::all_of(held.until.begin(), held.until.end(), known); };
  held_.erase(std::remove_if(held_.begin(), held_.end(), over), held_.end());
  int64_t bytes = now_[device];
  for (const auto& held : held_)
    if (held.device == device) bytes += held.size;
  return bytes;
}

void release(void* p) {
  if (p == nullptr) return;
  {
    Lock lock(mutex_);
    auto it = blocks_.find(static_cast<char*>(p));
    if (it == blocks_.end()) return;
    Block& block = it->second;
    Clock safe = clocks_[block.home];
    join(safe, host_);
    for (Slot s : block.recorded) join(safe, clocks_[s]);
    Pendings until = pendings_[block.home];  // what the stream waits for comes before its next use
    for (Slot s : block.recorded) until.insert(until.end(), pendings_[s].begin(), pendings_[s].end());
    until.erase(std::remove_if(until.begin(), until.end(), [](auto& p) { return p->done(); }), until.end());
    for (const auto* accesses : {&block.writes, &block.reads})
      for (const auto& [s, access] : *accesses)
        if (safe[s] < access.tick) late_uses_[block.home].push_back({s, access, block.size});
    now_[block.device] -= block.size;
    if (!block.recorded.empty()) {
      Held held{block.device, block.size};
      for (Slot s : block.recorded) held.until.emplace_back(s, clocks_[s][s]);
      held_.push_back(std::move(held));
    }
    if (until.empty()) std::memset(p, kPoison, block.capacity);
    free_[{block.home, block.capacity}].push_back({p, std::move(until)});
    blocks_.erase(it);
  }
}

std::vector<Note> freed_early(Slot home) {  // asked when a stream may use its memory again; with the lock
  std::vector<Note> notes;
  Clock safe = clocks_[home];
  join(safe, host_);
  for (const auto& [s, access, size] : late_uses_[home])
    if (safe[s] < access.tick)
      notes.push_back({"freed early", std::to_string(size) + " bytes of " + name_of(home) + " do not wait for " +
                                          access.what + " on " + name_of(s)});
  late_uses_.erase(home);
  return notes;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    char* p = nullptr;
    std::vector<Note> notes;
    const auto device = device_;
    if (size) {
      Lock lock(mutex_);
      size_t capacity = 512;
      while (capacity < size) capacity *= 2;
      const auto home = current(device);
      notes = freed_early(home);
      auto& candidates = free_[{home, capacity}];
      for (auto i = candidates.size(); i-- > 0 && p == nullptr;) {  // the last one first: what still uses it will show
        const auto& until = candidates[i].until;
        if (!std::all_of(until.begin(), until.end(), [](auto& pending) { return pending->done(); })) continue;
        p = static_cast<char*>(candidates[i].memory);
        candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(i));
      }
      if (p == nullptr && posix_memalign(reinterpret_cast<void**>(&p), 64, capacity)) throw std::bad_alloc();
      std::memset(p, kPoison, capacity);
      blocks_[p] = {device, home, size, capacity};
      now_[device] += size;
      peak_[device] = std::max(peak_[device], now_[device]);
      active_peak_[device] = std::max(active_peak_[device], active(device));
    }
    tell(notes);
    return {p, p, &release, c10::Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
Allocator allocator_;
REGISTER_ALLOCATOR(kSim, &allocator_);

void release_pinned(void* p) {
  {
    Lock lock(mutex_);
    pinned_.erase(static_cast<char*>(p));
  }
  std::free(p);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* p = nullptr;
    if (posix_memalign(&p, 64, std::max<size_t>(size, 64))) throw std::bad_alloc();
    std::memset(p, kPoison, size);
    Lock lock(mutex_);
    pinned_[static_cast<char*>(p)] = size;
    return {p, p, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
PinnedAllocator pinned_allocator_;

bool is_pinned(const void* p) {
  Lock lock(mutex_);
  auto* memory = static_cast<char*>(const_cast<void*>(p));
  auto it = pinned_.upper_bound(memory);
  if (it == pinned_.begin()) return false;
  --it;
  return memory < it->first + std::max<size_t>(it->second, 1);
}

// -- streams and events -----------------------------------------------------------------------------------------------

struct Event {
  Clock clock;
  Pendings pendings;
  std::chrono::steady_clock::time_point at;
  bool asked = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using S = c10::Stream;
  using D = c10::Device;
  static S stream(int device, int64_t id) { return S(S::UNSAFE, D(kSim, device), id); }
  static int index(D d) { return d.has_index() ? d.index() : device_; }
  static Slot slot(const S& s) { return slot_of(s.device_index(), s.id()); }
  c10::DeviceType type() const override { return kSim; }
  D exchangeDevice(D d) const override {
    const auto before = device_;
    device_ = d.index();
    return D(kSim, before);
  }
  D getDevice() const override { return D(kSim, device_); }
  void setDevice(D d) const override { device_ = d.index(); }
  void uncheckedSetDevice(D d) const noexcept override { device_ = d.index(); }
  S getStream(D d) const override { return stream(index(d), streams_[index(d)]); }
  S getDefaultStream(D d) const override { return stream(index(d), 0); }
  S getStreamFromGlobalPool(D d, bool high) const override {
    Lock lock(mutex_);
    const auto number = next_stream_[index(d)][high]++ % kPool;
    return stream(index(d), 1 + (high ? kPool : 0) + number);
  }
  S getNewStream(D d, int priority) const override { return getStreamFromGlobalPool(d, priority < 0); }
  S exchangeStream(S s) const override {
    const auto device = s.device_index();
    const auto before = streams_[device];
    streams_[device] = s.id();
    return stream(device, before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices); }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const S& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*e == nullptr) *e = new Event;
    auto& event = *static_cast<Event*>(*e);
    auto pendings = pending_on(slot(s));
    Lock lock(mutex_);
    put_on(slot(s));
    event = {clocks_[slot(s)], std::move(pendings), std::chrono::steady_clock::now()};
  }
  void block(void* e, const S& s) const override {
    if (e == nullptr) return;
    const auto& event = *static_cast<Event*>(e);
    Lock lock(mutex_);
    put_on(slot(s));
    join(clocks_[slot(s)], event.clock);
    add_pendings(pendings_[slot(s)], event.pendings);
    add_pendings(queue_of(slot(s)), event.pendings);
    ++stream_waits_;
  }
  bool queryEvent(void* e) const override {  // not at once: whoever asks must be able to go on
    if (e == nullptr) return true;
    auto& event = *static_cast<Event*>(e);
    for (const auto& pending : event.pendings)
      if (!pending->done()) return false;
    if (knows(event.clock)) return true;
    if (!std::exchange(event.asked, true)) return false;
    host_learns(event.clock);
    return true;
  }
  bool queryStream(const S& s) const override { return pending_on(slot(s)).empty(); }
  void synchronizeStream(const S& s) const override { host_waits(slot(s), "stream.synchronize"); }
  void synchronizeEvent(void* e) const override {
    if (e == nullptr) return;
    auto& event = *static_cast<Event*>(e);
    wait_for(event.pendings, "the host, which waits for an event,");
    host_learns(event.clock);
    tell({{"wait", "event.synchronize"}});
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    for (int s = 0; s < kStreams; ++s) {
      wait_for(pending_on(slot_of(d, s)), "the host, which waits for the device,");
      host_learns(clocks_[slot_of(d, s)]);
    }
    tell({{"wait", "device.synchronize"}});
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const S& s) const override {
    Lock lock(mutex_);
    auto it = blocks_.find(static_cast<char*>(p.get()));
    if (it != blocks_.end() && it->second.home != slot(s)) it->second.recorded.insert(slot(s));
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(b)->at - static_cast<Event*>(a)->at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- generators and hooks ---------------------------------------------------------------------------------------------

struct Generator : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex d) {
    device_ = c10::Device(kSim, d);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices); }
  void setCurrentDevice(c10::DeviceIndex d) const override { device_ = d; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(device_); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(device_, static_cast<int>(d)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    static std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (int i = 0; i < num_devices; ++i) made.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
      return made;
    }();
    return all[d < 0 ? device_ : d];
  }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(d < 0 ? device_ : d));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator_; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Device getDeviceFromPtr(void* p) const override {
    Lock lock(mutex_);
    return c10::Device(kSim, static_cast<c10::DeviceIndex>(blocks_.at(static_cast<char*>(p)).device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto p = allocator_.allocate(n);
    if (storage.nbytes()) std::memcpy(p.get(), storage.data(), std::min(n, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(p));
    storage.unsafeGetStorageImpl()->set_nbytes(n);
  }
};
Hooks hooks_;

// -- operations -------------------------------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator_, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator_,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor numbers(const at::Tensor& t) {  // the same memory, as a tensor of the host
  return t.is_cpu() ? t : at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(c10::kCPU));
}
void spoil(const at::Tensor& t) {
  Mute mute;
  auto there = numbers(t);
  if (t.is_floating_point() || t.is_complex()) there.fill_(NAN);
  else there.zero_();  // an index out of range would end the process
}
at::Tensor spoiled(const at::Tensor& t) {
  Mute mute;
  auto nonsense = at::empty_strided(t.sizes(), t.strides(), t.options());
  if (t.numel()) spoil(nonsense);
  return nonsense;
}

void order(Slot s, Slot after) {  // with the lock: what is on s now comes before what will be on the other one
  put_on(s);
  put_on(after);
  join(clocks_[after], clocks_[s]);
}

void arrive_in_order(Slot s, const at::Tensor& source) {  // with the lock: what streams have copied there before
  auto* begin = static_cast<char*>(source.storage().mutable_data());
  for (auto& copy : copies_)
    if (copy.to_host && copy.memory >= begin && copy.memory < begin + source.storage().nbytes() &&
        clocks_[s][copy.stream] >= copy.tick)
      std::memcpy(copy.memory, copy.bytes.data(), copy.bytes.size());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.numel() == 0) return to;
  if (muted_) {
    numbers(to).copy_(numbers(self));
    return to;
  }
  const bool from_host = self.is_cpu(), to_host = to.is_cpu();
  const auto s = current(from_host ? to.device().index() : self.device().index());
  wait_for(pending_on(s), "copy_ on " + name_of(s));
  std::vector<Note> notes;
  bool later = false;
  auto keep = from_host ? self : to;  // without our lock: a second reference to what Python knows takes Python's
  {
    Lock lock(mutex_);
    const auto other = from_host || to_host ? s : current(to.device().index());
    if (other != s) order(other, s);
    const auto tick = put_on(s);
    if (from_host) arrive_in_order(s, self);
    const bool race = reads(self, s, "copy_", notes);
    writes(to, s, "copy_", notes);
    if (other != s) order(s, other);
    const auto& host = from_host ? self : to;
    later = non_blocking && (from_host || to_host) && host.is_contiguous() && is_pinned(host.const_data_ptr());
    if (later && to_host) {
      Mute mute;
      auto given = at::empty_like(to, at::MemoryFormat::Contiguous);
      race ? spoil(given) : void(given.copy_(numbers(self)));
      auto* bytes = static_cast<char*>(given.data_ptr());
      copies_.push_back({s, tick, true, static_cast<char*>(to.data_ptr()), {bytes, bytes + given.nbytes()}, std::move(keep)});
      std::memset(to.data_ptr(), kPoison, to.nbytes());
    } else {
      race ? spoil(to) : void(numbers(to).copy_(numbers(self)));
      auto* bytes = static_cast<char*>(const_cast<void*>(host.is_cpu() ? host.const_data_ptr() : nullptr));
      if (later) copies_.push_back({s, tick, false, bytes, {bytes, bytes + self.nbytes()}, std::move(keep)});
    }
  }
  tell(notes);
  if (to_host && !later) host_waits(s, "copy to the host");
  if (from_host && !non_blocking) host_waits(s, "copy to the device");
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, true);
}
at::Scalar local_scalar(const at::Tensor& self) {
  const auto s = current(self.device().index());
  bool race = false;
  if (!muted_) {
    wait_for(pending_on(s), "item on " + name_of(s));
    std::vector<Note> notes;
    {
      Lock lock(mutex_);
      put_on(s);
      race = reads(self, s, "item", notes);
    }
    tell(notes);
    host_waits(s, "item");
  }
  return numbers(race ? spoiled(self) : self).item();
}
void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }
bool same_kind(const at::Tensor&, const at::Tensor&) { return true; }

template <class Each>
void each_tensor(const c10::IValue& value, Each each) {
  if (value.isTensor()) each(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& t : value.toTensorVector()) each(t);
  else if (value.isOptionalTensorList())
    for (const auto& t : value.toOptionalTensorVector())
      if (t) each(*t);
}

int device_among(const torch::jit::Stack& stack, size_t count) {
  int found = -1;
  for (size_t i = stack.size() - count; i < stack.size(); ++i)
    each_tensor(stack[i], [&](const at::Tensor& t) {
      if (found < 0 && t.defined() && t.device().type() == kSim) found = t.device().index();
    });
  return found < 0 ? device_ : found;
}

// The kernels of the host draw from its generator: meanwhile that one has the state of the device's.
struct Drawing {
  at::Generator host = at::detail::getDefaultCPUGenerator(), ours;
  at::Tensor state = host.get_state();
  Drawing(torch::jit::Stack& stack, size_t count, int device)
      : ours(hooks_.getDefaultGenerator(static_cast<c10::DeviceIndex>(device))) {
    for (size_t i = stack.size() - count; i < stack.size(); ++i)
      if (stack[i].isGenerator()) {
        ours = stack[i].toGenerator();
        stack[i] = c10::IValue();
      }
    host.set_state(ours.get_state());
  }
  ~Drawing() {
    ours.set_state(host.get_state());
    host.set_state(state);
  }
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, void (*on_host)(const c10::OperatorHandle&, torch::jit::Stack*)) {
  if (muted_) {
    on_host(op, stack);
    return;
  }
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto& name = schema.name();
  const auto device = device_among(*stack, count);
  const auto s = current(device);
  wait_for(pending_on(s), name + " on " + name_of(s));
  std::vector<Note> notes;
  {
    Lock lock(mutex_);
    put_on(s);
    for (size_t i = 0; i < count; ++i) {
      auto& value = (*stack)[stack->size() - count + i];
      const auto* alias = schema.arguments()[i].alias_info();
      const bool is_written = alias != nullptr && alias->isWrite();
      bool race = false;
      each_tensor(value, [&](const at::Tensor& t) {
        if (is_written) writes(t, s, name, notes);
        else race = reads(t, s, name, notes) || race;
      });
      if (race && value.isTensor()) value = spoiled(value.toTensor());
    }
  }
  {
    Mute mute;
    c10::DeviceGuard guard(c10::Device(kSim, static_cast<c10::DeviceIndex>(device)));
    std::optional<Drawing> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(*stack, count, device);
    on_host(op, stack);
  }
  {
    Lock lock(mutex_);
    const auto results = schema.returns().size();
    for (size_t i = 0; i < results; ++i)
      if (schema.returns()[i].alias_info() == nullptr)
        each_tensor((*stack)[stack->size() - results + i], [&](const at::Tensor& t) { writes(t, s, name, notes); });
  }
  tell(notes);
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }
void convolution_on_host(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  at::native::cpu_fallback(op, stack);
}
void convolution_backward_on_host(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto first = stack->end() - 10;
  const std::vector<int64_t> bias_sizes{first->toTensor().size(1)};
  stack->insert(first + 3, c10::IValue(bias_sizes));
  at::native::cpu_fallback(op, stack);
}
// any operation that has none of its own
void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, stack, &on_host); }
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, stack, &convolution_on_host); }
void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(op, stack, &convolution_backward_on_host);
}

// Its schema does not say that it writes into running statistics; that of its twin, which must have some, does.
void batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto twin = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_native_batch_norm_legit", "");
  const auto& running_mean = *(stack->end() - 5);
  const bool has_statistics = running_mean.isTensor() && running_mean.toTensor().defined();
  run(has_statistics ? twin : op, stack, &on_host);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_batch_norm", torch::CppFunction::makeFromBoxedFunction<&batch_norm>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  for (const auto* name : {"native_layer_norm", "native_layer_norm_backward"})  // elsewhere in several kernels: other bits
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", same_kind);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

// -- work that another process takes part in --------------------------------------------------------------------------

struct Transfer {
  std::string who;
  Pendings before;
  std::shared_ptr<Pending> own;
};

Transfer put_transfer(int device, int64_t stream, const std::string& what, const std::vector<at::Tensor>& read,
                      const std::vector<at::Tensor>& written) {
  const auto s = slot_of(device, stream);
  Transfer transfer{what + " on " + name_of(s), pending_on(s), std::make_shared<Pending>()};
  transfer.own->what = transfer.who;
  std::vector<Note> notes;
  {
    Lock lock(mutex_);
    put_on(s);
    for (const auto& t : read) reads(t, s, what, notes);
    for (const auto& t : written) writes(t, s, what, notes);
    pendings_[s].push_back(transfer.own);
    add_pendings(queue_of(s), transfer.before);  // it holds the queue until it starts, and then no longer
  }
  tell(notes);
  return transfer;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](int devices) {
    num_devices = devices;
    clocks_.assign(devices * kStreams, Clock(devices * kStreams));
    pendings_.resize(devices * kStreams);
    queues_.resize(devices * kStreams);
    host_.resize(devices * kStreams);
    at::RegisterPrivateUse1HooksInterface(&hooks_);
  });
  m.def("listen", [](py::object listener) {
    delete listener_;
    listener_ = listener.is_none() ? nullptr : new py::object(listener);
  });
  m.def("current_device", [] { return device_; });
  m.def("set_device", [](int device) { device_ = device; });
  m.def("set_queues", [](int count) { num_queues_ = count; });
  m.def("stream_waits", [] { return stream_waits_; });
  m.def("allocated", [](int device) { return now_[device]; });
  m.def("peak", [](int device) { return peak_[device]; });
  m.def("active_peak", [](int device) { return active_peak_[device]; });
  m.def("reset_peak", [](int device) {
    Lock lock(mutex_);
    peak_[device] = now_[device];
    active_peak_[device] = active(device);
  });
  m.def("default_generator", [](int device) { return hooks_.getDefaultGenerator(static_cast<c10::DeviceIndex>(device)); });
  m.def("put_transfer", &put_transfer);
  py::class_<Transfer>(m, "Transfer")
      .def("wait_for_turn", [](const Transfer& t) { wait_for(t.before, t.who); })
      .def("finish", [](const Transfer& t, const std::string& error) { t.own->finish(error); }, py::arg("error") = "");
}
