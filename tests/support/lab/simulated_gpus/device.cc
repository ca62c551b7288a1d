// A device of type GPU whose memory is the host's and whose kernels are the CPU's: for each kernel that TensorFlow's
// CUDA build registers for GPUs (a list that SIMULATED_GPU_KERNELS names), one that runs the CPU's kernel.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "tensorflow/core/common_runtime/copy_tensor.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/common_runtime/local_device.h"
#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/public/session_options.h"

namespace tensorflow {
namespace {

void Share(const Tensor* from, Tensor* to) {
  if (from->TotalBytes() == 0) return;
  if (DataTypeCanUseMemcpy(from->dtype())) {
    std::memcpy(DMAHelper::base(to), DMAHelper::base(from), from->TotalBytes());
  } else {
    *to = *from;
  }
}

void Between(DeviceContext*, DeviceContext*, Device*, Device*, const AllocatorAttributes, const AllocatorAttributes,
             const Tensor* in, Tensor* out, int, StatusCallback done) {
  Share(in, out);
  done(absl::OkStatus());
}

class Context : public DeviceContext {
 public:
  absl::Status ThenExecute(Device*, stream_executor::Stream*, std::function<void()> function) override {
    function();
    return absl::OkStatus();
  }

  void CopyCPUTensorToDevice(const Tensor* cpu, Device*, Tensor* device, StatusCallback done, bool) const override {
    Share(cpu, device);
    done(absl::OkStatus());
  }
  void CopyDeviceTensorToCPU(const Tensor* device, absl::string_view, Device*, Tensor* cpu,
                             StatusCallback done) override {
    Share(device, cpu);
    done(absl::OkStatus());
  }
  void CopyTensorInSameDevice(const Tensor* in, Device*, Tensor* out, StatusCallback done) const override {
    Share(in, out);
    done(absl::OkStatus());
  }
};

class SimulatedGpu : public LocalDevice {
 public:
  SimulatedGpu(const SessionOptions& options, const DeviceAttributes& attributes)
      : LocalDevice(options, attributes), context_(new Context) {
    info_.default_context = context_;
    info_.gpu_id = parsed_name().id;
    set_tensorflow_accelerator_device_info(&info_);
  }
  ~SimulatedGpu() override { context_->Unref(); }
  Allocator* GetAllocator(AllocatorAttributes) override { return cpu_allocator(); }
  Allocator* GetScopedAllocator(AllocatorAttributes, int64_t) override { return cpu_allocator(); }
  absl::Status MakeTensorFromProto(const TensorProto& proto, const AllocatorAttributes, Tensor* tensor) override {
    Tensor parsed(proto.dtype());
    if (!parsed.FromProto(cpu_allocator(), proto)) return errors::InvalidArgument("Cannot parse tensor from proto");
    *tensor = parsed;
    return absl::OkStatus();
  }
  void CopyTensorInSameDevice(const Tensor* in, Tensor* out, const DeviceContext*, StatusCallback done) override {
    Share(in, out);
    done(absl::OkStatus());
  }
  absl::Status TryGetDeviceContext(DeviceContext** out) override {
    context_->Ref();
    *out = context_;
    return absl::OkStatus();
  }
  absl::Status Sync() override { return absl::OkStatus(); }

 private:
  Context* context_;
  AcceleratorDeviceInfo info_;
};

std::vector<std::string> Visible() {
  const char* count = std::getenv("SIMULATED_GPUS");
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const int present = count ? std::atoi(count) : 0;
  std::vector<std::string> found;
  for (int i = 0; !visible && i < present; ++i) found.push_back(std::to_string(i));
  if (visible) {
    std::stringstream parts(visible);
    for (std::string part; std::getline(parts, part, ',');) {
      if (part.empty() || !isdigit(part[0]) || std::atoi(part.c_str()) >= present) break;
      found.push_back(part);
    }
  }
  return found;
}

class Factory : public DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    for (size_t i = 0; i < Visible().size(); ++i) devices->push_back("/physical_device:GPU:" + std::to_string(i));
    return absl::OkStatus();
  }
  absl::Status GetDeviceDetails(int index, std::unordered_map<std::string, std::string>* details) override {
    (*details)["device_name"] = "Simulated GPU " + Visible()[index];
    return absl::OkStatus();
  }
  absl::Status CreateDevices(const SessionOptions& options, const std::string& prefix,
                             std::vector<std::unique_ptr<Device>>* devices) override {
    const auto& gpu = options.config.gpu_options();
    std::vector<int> chosen;
    if (gpu.visible_device_list().empty()) {
      for (size_t i = 0; i < Visible().size(); ++i) chosen.push_back(i);
    } else {
      std::stringstream parts(gpu.visible_device_list());
      for (std::string part; std::getline(parts, part, ',');) chosen.push_back(std::atoi(part.c_str()));
    }
    const int64_t total = int64_t{16} << 30;
    const double fraction = gpu.per_process_gpu_memory_fraction();
    int number = 0;
    for (size_t i = 0; i < chosen.size(); ++i) {
      std::vector<int64_t> limits;
      if (i < static_cast<size_t>(gpu.experimental().virtual_devices_size()))
        for (float mb : gpu.experimental().virtual_devices(i).memory_limit_mb()) limits.push_back(int64_t(mb) << 20);
      if (limits.empty()) limits.push_back(fraction > 0 ? int64_t(total * fraction) : total);
      for (int64_t limit : limits) {
        const std::string name = prefix + "/device:GPU:" + std::to_string(number++);
        devices->push_back(std::make_unique<SimulatedGpu>(
            options, Device::BuildDeviceAttributes(name, DEVICE_GPU, Bytes(limit), DeviceLocality(),
                                                   "simulated GPU " + Visible()[chosen[i]] +
                                                       (gpu.allow_growth() ? ", grows" : ""))));
      }
    }
    return absl::OkStatus();
  }
};

OpKernel* OnCpu(OpKernelConstruction* construction) {
  std::shared_ptr<const NodeProperties> props;
  const OpRegistryInterface* registry = OpRegistry::Global();
  if (construction->function_library()) registry = construction->function_library()->GetFunctionLibraryDefinition();
  absl::Status status = NodeProperties::CreateFromNodeDef(construction->def(), registry, &props);
  OpKernel* kernel = nullptr;
  if (status.ok()) {
    auto* device = static_cast<DeviceBase*>(construction->device());
    status = CreateOpKernel(DEVICE_CPU, device, device->GetAllocator({}), construction->function_library(),
                            construction->resource_manager(), props, construction->graph_def_version(), &kernel);
  }
  if (!status.ok()) construction->CtxFailure(status);
  return kernel;
}

class Proxy : public OpKernel {
 public:
  Proxy(OpKernelConstruction* construction, OpKernel* kernel) : OpKernel(construction), kernel_(kernel) {}
  void Compute(OpKernelContext* context) override { kernel_->Compute(context); }
  const Tensor* const_tensor() const override { return kernel_->const_tensor(); }
  bool IsExpensive() override { return kernel_->IsExpensive(); }

 private:
  std::unique_ptr<OpKernel> kernel_;
};

class AsyncProxy : public AsyncOpKernel {
 public:
  AsyncProxy(OpKernelConstruction* construction, OpKernel* kernel) : AsyncOpKernel(construction), kernel_(kernel) {}
  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    kernel_->AsAsync()->ComputeAsync(context, std::move(done));
  }

 private:
  std::unique_ptr<OpKernel> kernel_;
};

class Failed : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override {}
};

class KernelFactory : public kernel_factory::OpKernelFactory {
 public:
  OpKernel* Create(OpKernelConstruction* construction) override {
    if (const char* folder = std::getenv("SIMULATED_GPU_LOG")) {
      std::ofstream log(std::string(folder) + "/" + std::to_string(getpid()), std::ios::app);
      log << construction->device()->name() + "\t" + construction->def().op() + "\t" + construction->def().name() + "\n";
    }
    OpKernel* kernel = OnCpu(construction);
    if (!kernel) return new Failed(construction);
    if (kernel->AsAsync()) return new AsyncProxy(construction, kernel);
    return new Proxy(construction, kernel);
  }
};

bool Registered() {
  const char* path = std::getenv("SIMULATED_GPU_KERNELS");
  if (!path) return false;
  DeviceFactory::Register("GPU", std::make_unique<Factory>(), 210, /*is_pluggable_device=*/true);
  TF_CHECK_OK(CopyTensor::Register(DEVICE_GPU, DEVICE_GPU, Between, /*is_pluggable_device=*/true));
  std::ifstream lines(path);
  for (std::string line; std::getline(lines, line);) {  // op<TAB>host arguments<TAB>attr=types;...
    std::stringstream columns(line);
    std::string op, host, constraints, part;
    std::getline(columns, op, '\t');
    std::getline(columns, host, '\t');
    std::getline(columns, constraints, '\t');
    KernelDefBuilder builder(op.c_str());
    builder.Device("GPU");
    std::stringstream hosts(host), each(constraints);
    while (std::getline(hosts, part, ',')) builder.HostMemory(part.c_str());
    while (std::getline(each, part, ';')) {
      const auto at = part.find('=');
      std::vector<DataType> types;
      std::stringstream numbers(part.substr(at + 1));
      for (std::string number; std::getline(numbers, number, ',');)
        types.push_back(static_cast<DataType>(std::atoi(number.c_str())));
      builder.TypeConstraint(part.substr(0, at).c_str(), types);
    }
    kernel_factory::OpKernelRegistrar registrar(builder.Build(), "SimulatedGpuKernel", std::make_unique<KernelFactory>());
  }
  return true;
}

const bool registered = Registered();

}  // namespace
}  // namespace tensorflow
