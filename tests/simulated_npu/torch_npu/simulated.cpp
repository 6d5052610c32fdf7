// An NPU that is host memory: what torch must be given so that a device of its own kind (PrivateUse1) computes.
//
// Real are dispatch, autograd, storages, device guards, generators and hooks: torch treats the tensors as those of any
// accelerator, and refuses to mix them with others. Simulated is the arithmetic: every operator without a kernel here
// is called on CPU tensors that share the memory of the NPU's. Streams are in name only: work is done when a call
// returns.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

using at::Tensor;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int MOST = 16;  // devices of a host

c10::DeviceIndex visible_devices() {
  // as many as there are, narrowed as CANN does it
  static const c10::DeviceIndex found = [] {
    const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (visible != nullptr) {
      const std::string names(visible);
      return names.empty() ? 0 : static_cast<int>(std::count(names.begin(), names.end(), ',') + 1);
    }
    const char* all = std::getenv("SIMULATED_NPUS");
    return all == nullptr ? 0 : std::min(std::atoi(all), MOST);
  }();
  return found;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, MOST> current_stream{};
std::atomic<c10::StreamId> last_stream{0};

void check_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < visible_devices(), "npu:", int(index), " is not there: ", int(visible_devices()),
              " are visible");
}

// ---- memory -------------------------------------------------------------------------------------------------------

struct Usage {
  std::atomic<int64_t> now{0}, peak{0};
};
std::array<Usage, MOST> usage;

struct Block {
  void* data;
  int64_t nbytes;
  c10::DeviceIndex device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  usage[block->device].now -= block->nbytes;
  std::free(block->data);
  delete block;
}

struct NpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    check_device(current_device);
    const c10::Device device(NPU, current_device);
    if (nbytes == 0) return {nullptr, device};
    void* data = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
    TORCH_CHECK(data != nullptr, "NPU out of memory. Tried to allocate ", nbytes, " bytes");
    auto& used = usage[current_device];
    const int64_t now = used.now += static_cast<int64_t>(nbytes);
    int64_t peak = used.peak;
    while (now > peak && !used.peak.compare_exchange_weak(peak, now)) {
    }
    return {data, new Block{data, static_cast<int64_t>(nbytes), current_device}, &release, device};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};
NpuAllocator allocator;
REGISTER_ALLOCATOR(NPU, &allocator)

// Page-locked memory is plain memory that is known to be page-locked.
std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto* data = static_cast<char*>(std::malloc(std::max<size_t>(nbytes, 1)));
    const std::lock_guard<std::mutex> lock(pinned_lock);
    pinned[data] = nbytes;
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  static void free_pinned(void* data) {
    const std::lock_guard<std::mutex> lock(pinned_lock);
    pinned.erase(static_cast<char*>(data));
    std::free(data);
  }
  static bool holds(const void* data) {
    const std::lock_guard<std::mutex> lock(pinned_lock);
    auto after = pinned.upper_bound(static_cast<const char*>(data));
    if (after == pinned.begin()) return false;
    --after;
    return static_cast<const char*>(data) < after->first + std::max<size_t>(after->second, 1);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator pinned_allocator;
REGISTER_HOST_ALLOCATOR(NPU, &pinned_allocator)

// ---- device, streams, generators ----------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

struct NpuGuard final : c10::impl::DeviceGuardImplInterface {
  NpuGuard() = default;
  explicit NpuGuard(c10::DeviceType) {}
  c10::DeviceType type() const override { return NPU; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(NPU, current_device);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {NPU, current_device}; }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    check_device(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return visible_devices(); }

  static c10::Device known(c10::Device device) { return device.has_index() ? device : c10::Device(NPU, current_device); }
  c10::Stream getStream(c10::Device device) const override {
    device = known(device);
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, known(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, known(device), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto passed = *static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard)

// Numbers are drawn by a CPU generator inside, which no other device shares.
struct NpuGenerator final : c10::GeneratorImpl {
  explicit NpuGenerator(c10::DeviceIndex index)
      : GeneratorImpl({NPU, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::make_generator<at::CPUGeneratorImpl>()) {}
  at::Generator host;

  c10::GeneratorImpl& inner() const { return *host.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override { inner().set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner().set_offset(offset); }
  uint64_t get_offset() const override { return inner().get_offset(); }
  uint64_t current_seed() const override { return inner().current_seed(); }
  uint64_t seed() override { return inner().seed(); }
  void set_state(const c10::TensorImpl& state) override { inner().set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner().get_state(); }
  NpuGenerator* clone_impl() const override {
    auto* copy = new NpuGenerator(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < MOST; ++i) made.push_back(at::make_generator<NpuGenerator>(i));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = allocator.allocate(nbytes);
  if (const size_t kept = std::min(nbytes, impl->nbytes())) std::memcpy(data.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(nbytes);
}

struct NpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return visible_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return visible_devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { NpuGuard().setDevice({NPU, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return NpuGuard().exchangeDevice({NPU, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<NpuGenerator>(index < 0 ? current_device : index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::holds(data); }
  c10::Device getDeviceFromPtr(void*) const override { return {NPU, current_device}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

// ---- operators ----------------------------------------------------------------------------------------------------

// The NPU tensors of a call as CPU tensors over the same memory.
class HostView {
 public:
  Tensor of(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != NPU) {
      // a number may come from anywhere
      has_others_ |= tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    if (!device_) device_ = tensor.device();
    for (const auto& pair : pairs_)
      if (pair.npu.is_same(tensor)) return pair.host;
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        storage_of(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = host.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (tensor.is_conj()) host._set_conj(true);
    if (tensor.is_neg()) host._set_neg(true);
    pairs_.push_back({tensor, host});
    return host;
  }

  // What a CPU operator has returned, as a tensor of the NPU: an argument, a view of one, or something new.
  Tensor back(const Tensor& result) {
    if (!result.defined() || !device_ || result.device().type() != c10::kCPU) return result;
    for (const auto& pair : pairs_)
      if (pair.host.is_same(result)) return pair.npu;
    for (const auto& [npu, host] : storages_) {
      if (host.unsafeGetStorageImpl() != result.storage().unsafeGetStorageImpl()) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(npu), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
      return view;
    }
    const c10::DeviceGuard guard(*device_);
    const auto& source = result.storage();
    c10::Storage copy(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), source.nbytes(), allocator.allocate(source.nbytes()), &allocator, true));
    if (source.nbytes()) std::memcpy(copy.mutable_data(), source.data(), source.nbytes());
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(copy), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    if (result.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return tensor;
  }

  // An operator may have resized what it was given: the NPU's tensors follow.
  void follow() {
    for (auto& [npu, host] : storages_) {
      if (host.data() == npu.data() && host.nbytes() == npu.nbytes()) continue;
      resize_storage(npu, host.nbytes());
      if (host.nbytes()) std::memcpy(npu.mutable_data(), host.data(), host.nbytes());
    }
    for (auto& pair : pairs_) {
      auto* impl = pair.npu.unsafeGetTensorImpl();
      if (pair.host.sizes() != pair.npu.sizes() || pair.host.strides() != pair.npu.strides())
        impl->set_sizes_and_strides(pair.host.sizes(), pair.host.strides(), pair.host.storage_offset());
    }
  }

  // On a real device the memory of others is out of reach.
  bool mixes_devices() const { return !pairs_.empty() && has_others_; }

  void meant_for(c10::Device device) {
    if (!device_) device_ = NpuGuard::known(device);
  }

 private:
  struct Pair {
    Tensor npu, host;
  };
  c10::Storage storage_of(const c10::Storage& npu) {
    for (const auto& [known, host] : storages_)
      if (known.unsafeGetStorageImpl() == npu.unsafeGetStorageImpl()) return host;
    auto* owner = new c10::Storage(npu);  // the memory stays as long as something on the host uses it
    c10::DataPtr data(npu.mutable_data(), owner, [](void* held) { delete static_cast<c10::Storage*>(held); },
                      c10::Device(c10::kCPU));
    c10::Storage host(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), npu.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true));
    storages_.emplace_back(npu, host);
    return host;
  }
  std::vector<Pair> pairs_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
  std::optional<c10::Device> device_;
  bool has_others_ = false;
};

c10::IValue to_host(HostView& view, const c10::IValue& value) {
  if (value.isTensor()) return view.of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& tensor : value.toTensorVector()) all.push_back(view.of(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const auto& tensor : value.toOptionalTensorVector())
      all.push_back(tensor ? std::optional<Tensor>(view.of(*tensor)) : std::nullopt);
    return all;
  }
  if (value.isDevice() && value.toDevice().type() == NPU) {
    view.meant_for(value.toDevice());
    return c10::Device(c10::kCPU);
  }
  if (value.isGenerator() && value.toGenerator().device().type() == NPU)
    return value.toGenerator().get<NpuGenerator>()->host;
  return value;
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  HostView view;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = (*stack)[first + i];
    // without a generator the NPU's own default is meant
    const auto& type = *schema.arguments()[i].type();
    const bool draws = value.isNone() && type.kind() == c10::TypeKind::OptionalType &&
        type.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType;
    value = draws ? c10::IValue(default_generator(-1).get<NpuGenerator>()->host) : to_host(view, value);
  }
  // only what is indexed with may be on the host
  TORCH_CHECK(!view.mixes_devices() || schema.name().find("index") != std::string::npos,
              "Expected all tensors to be on the same device, but ", schema.name(), " was given some of the cpu");
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  view.follow();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = view.back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& tensor : value.toTensorVector()) all.push_back(view.back(tensor));
      value = all;
    }
  }
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only memory of the host is page-locked");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  HostView view;
  view.of(target).copy_(view.of(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  HostView view;
  view.of(target).resize_(source.sizes()).copy_(view.of(source));
  view.follow();
  return target;
}

void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  // these make tensors of the same memory wherever it is
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

// ---- collectives --------------------------------------------------------------------------------------------------

// Takes tensors of the NPU only, as HCCL does, and hands their memory to gloo.
class Hccl final : public c10d::Backend {
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;

 public:
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = of(tensors);
    return gloo_->broadcast(host, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = of(tensors);
    return gloo_->allreduce(host, options);
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = of(tensors);
    return gloo_->allreduce_coalesced(host, options);
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = of(tensors);
    return gloo_->reduce(host, options);
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = of(outputs);
    auto from = of(inputs);
    return gloo_->allgather(to, from, options);
  }
  Work _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = of(output), from = of(input);
    return gloo_->_allgather_base(to, from, options);
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override {
    auto to = of(outputs), from = of(inputs);
    return gloo_->allgather_into_tensor_coalesced(to, from, options);
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = of(outputs);
    auto from = of(inputs);
    return gloo_->gather(to, from, options);
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto to = of(outputs);
    auto from = of(inputs);
    return gloo_->scatter(to, from, options);
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override {
    auto to = of(outputs);
    auto from = of(inputs);
    return gloo_->reduce_scatter(to, from, options);
  }
  Work _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = of(output), from = of(input);
    return gloo_->_reduce_scatter_base(to, from, options);
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    auto to = of(outputs), from = of(inputs);
    return gloo_->reduce_scatter_tensor_coalesced(to, from, options);
  }
  Work alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& receives, std::vector<int64_t>& sends,
                     const c10d::AllToAllOptions& options) override {
    auto to = of(output), from = of(input);
    return gloo_->alltoall_base(to, from, receives, sends, options);
  }
  Work send(Tensors& tensors, int to, int tag) override {
    auto host = of(tensors);
    return gloo_->send(host, to, tag);
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    auto host = of(tensors);
    return gloo_->recv(host, from, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  static Tensor of(const Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == NPU, "hccl takes tensors of the npu, not of ", tensor.device());
    return HostView().of(tensor);
  }
  static Tensors of(const Tensors& tensors) {
    Tensors host;
    for (const auto& tensor : tensors) host.push_back(of(tensor));
    return host;
  }
  static std::vector<Tensors> of(const std::vector<Tensors>& lists) {
    std::vector<Tensors> host;
    for (const auto& tensors : lists) host.push_back(of(tensors));
    return host;
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new NpuHooks);
  m.def("device_count", [] { return int(visible_devices()); });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int index) { NpuGuard().setDevice({NPU, static_cast<c10::DeviceIndex>(index)}); });
  m.def("set_stream", [](int index, int64_t id) { current_stream.at(index) = id; });
  m.def("memory_allocated", [](int index) { return usage.at(index).now.load(); });
  m.def("max_memory_allocated", [](int index) { return usage.at(index).peak.load(); });
  m.def("reset_peak_memory_stats", [](int index) { usage.at(index).peak = usage.at(index).now.load(); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("hccl", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Hccl>(gloo);
  });
}
