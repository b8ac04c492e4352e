// The program around one generated kernel: reads a job, runs all blocks, writes the outputs back. The job is a file
// that run.py writes. Exit status 0: all went well; 3: a fault was reported; anything else: the emulator failed.
#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>

#include <utility>

#include "hooks.h"

extern "C" const u32 emulator_params_bytes;
extern "C" void emulator_kernel(const void* params);

constexpr size_t kParamsAlignment = 128;

struct JobHeader {
  u64 seed;
  u32 grid[3];
  u32 threads;
  u32 shared;
  u32 processes;
  u32 seconds;
  u32 params_bytes;
  u32 num_tensors;
  u32 num_pointers;
  u32 params_offset;  // in the file
  u32 unused;
};
struct JobTensor {
  char name[16];
  u64 file_offset;
  u64 bytes;
  u32 first_pointer;  // of its addresses, in the list behind the tensors
  u32 pointers;       // how many
  u32 misalignment;   // bytes of the first element beyond a multiple of 256
  u32 writable;
  u32 begin;  // of element (0, 0, ...), in bytes
  u32 unused;
};

// An address that the parameters hold.
struct JobPointer {
  u32 place;    // in the parameters
  u32 element;  // bytes beyond element (0, 0, ...)
};

static void* params = nullptr;
static u32 limit_seconds = 0;

static void thread_entry() {
  emulator_kernel(params);
  thread_returned();
  __builtin_trap();  // nobody resumes a thread that has returned
}

static void on_crash(int number, siginfo_t* info, void* context) {
  if (number == SIGALRM) {
    fault_in_signal(context, "the kernel has not ended after %u seconds", limit_seconds);
  }
  const u64 below = current ? reinterpret_cast<u64>(current->fiber.stack) - reinterpret_cast<u64>(info->si_addr) : 0;
  if (number == SIGSEGV && below - 1 < kGuardBytes) {
    fault_in_signal(context, "a thread needs more than %zu bytes of stack", kStackBytes);
  }
  fault_in_signal(context, "the kernel crashed: %s at address %p", strsignal(number), info->si_addr);
}

static void catch_crashes() {
  stack_t stack = {};
  stack.ss_size = 256 * 1024;
  stack.ss_sp = malloc(stack.ss_size);
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGALRM}) {
    sigaction(number, &action, nullptr);
  }
}

static void require(bool good, const char* what) {
  if (!good) {
    fprintf(stderr, "the emulator failed: %s\n", what);
    exit(2);
  }
}

static void read_whole(int file, void* target, size_t bytes, size_t offset) {
  char* next = static_cast<char*>(target);
  while (bytes > 0) {
    const ssize_t got = pread(file, next, bytes, static_cast<off_t>(offset));
    require(got > 0, "the job can't be read");
    next += got, offset += static_cast<size_t>(got), bytes -= static_cast<size_t>(got);
  }
}

static void write_whole(int file, const void* source, size_t bytes, size_t offset) {
  const char* next = static_cast<const char*>(source);
  while (bytes > 0) {
    const ssize_t got = pwrite(file, next, bytes, static_cast<off_t>(offset));
    require(got > 0, "the outputs can't be written");
    next += got, offset += static_cast<size_t>(got), bytes -= static_cast<size_t>(got);
  }
}

// Each tensor in memory of its own, between pages that can't be touched; inputs can't be written.
static char* place(int file, const JobTensor& tensor) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t needed = (tensor.misalignment + tensor.bytes + page) / page * page;
  void* memory = mmap(nullptr, needed + 2 * page, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "no memory for a tensor");
  char* pages = static_cast<char*>(memory) + page;
  require(mprotect(pages, needed, PROT_READ | PROT_WRITE) == 0, "no memory for a tensor");
  char* begin = pages + tensor.misalignment;
  read_whole(file, begin, tensor.bytes, tensor.file_offset);
  if (!tensor.writable) {
    require(mprotect(pages, needed, PROT_READ) == 0, "a tensor can't be protected");
  }
  return begin;
}

// Every `stride`-th of the blocks from `first` on.
static void run_blocks(const std::vector<u32>& order, u64 seed, u32 first, u32 stride, u32 seconds) {
  itimerval limit = {};
  limit.it_value.tv_sec = seconds;
  setitimer(ITIMER_REAL, &limit, nullptr);
  for (size_t index = first; index < order.size(); index += stride) {
    random_state = seed * 0x2545f4914f6cdd1du + order[index];
    run_block(order[index], thread_entry);
  }
}

int main(int argc, char** argv) {
  require(argc == 2, "it takes one argument, a job");
  const int file = open(argv[1], O_RDWR);
  require(file >= 0, "the job can't be opened");
  JobHeader job;
  read_whole(file, &job, sizeof job, 0);
  require(job.params_bytes == emulator_params_bytes, "the parameters have another size than the kernel's");
  require(job.threads % kWarpLanes == 0 && job.threads > 0 && job.threads <= kMaxThreads,
          "threads come in whole warps");
  require(job.shared <= kSharedLimit, "no block has that much shared memory");
  params =
      aligned_alloc(kParamsAlignment, (job.params_bytes + kParamsAlignment - 1) / kParamsAlignment * kParamsAlignment);
  require(params != nullptr, "no memory for the parameters");
  parameters = {reinterpret_cast<uintptr_t>(params), reinterpret_cast<uintptr_t>(params) + job.params_bytes};
  read_whole(file, params, job.params_bytes, job.params_offset);

  std::vector<JobTensor> tensors(job.num_tensors);
  read_whole(file, tensors.data(), tensors.size() * sizeof(JobTensor), sizeof job);
  std::vector<JobPointer> places(job.num_pointers);
  read_whole(file, places.data(), places.size() * sizeof(JobPointer), sizeof job + tensors.size() * sizeof(JobTensor));
  for (const JobTensor& tensor : tensors) {
    char* begin = place(file, tensor);
    Region region = {{}, begin, begin + tensor.bytes, tensor.writable != 0};
    memcpy(region.name, tensor.name, sizeof region.name - 1);
    regions.push_back(region);
    for (u32 index = tensor.first_pointer; index < tensor.first_pointer + tensor.pointers; ++index) {
      const char* element = begin + tensor.begin + places[index].element;
      memcpy(static_cast<char*>(params) + places[index].place, &element, sizeof element);
    }
  }

  num_threads = job.threads;
  num_warps = job.threads / kWarpLanes;
  shared_bytes = job.shared;
  limit_seconds = job.seconds;
  gridDim = {job.grid[0], job.grid[1], job.grid[2]};
  blockDim = {job.threads, 1, 1};
  reserve_stamps();
  for (u32 index = 0; index < num_threads; ++index) {
    Thread& thread = threads[index];
    thread.index = index;
    thread.lane = index % kWarpLanes;
    thread.warp = &warps[index / kWarpLanes];
    allocate_stack(thread.fiber);
  }
  for (u32 index = 0; index < num_warps; ++index) {
    warps[index].lanes = threads + index * kWarpLanes;
    warps[index].index = index;
  }
  find_program();
  constants.push_back(parameters);
  for (const Dim3* builtin : {&threadIdx, &blockIdx, &blockDim, &gridDim}) {
    constants.push_back({reinterpret_cast<uintptr_t>(builtin), reinterpret_cast<uintptr_t>(builtin + 1)});
  }
  catch_crashes();

  random_state = random_seed = job.seed;
  std::vector<u32> order(static_cast<size_t>(job.grid[0]) * job.grid[1] * job.grid[2]);
  for (size_t index = 0; index < order.size(); ++index) {
    order[index] = static_cast<u32>(index);
    std::swap(order[index], order[random_bits() % (index + 1)]);
  }

  int status = 0;
  if (job.processes <= 1) {
    run_blocks(order, job.seed, 0, 1, job.seconds);
  } else {
    for (u32 process = 0; process < job.processes; ++process) {
      const pid_t child = fork();
      require(child >= 0, "no further process can be started");
      if (child == 0) {
        run_blocks(order, job.seed, process, job.processes, job.seconds);
        _exit(0);
      }
    }
    for (u32 process = 0; process < job.processes; ++process) {
      int ended = 0;
      require(wait(&ended) > 0, "a process got lost");
      const int code = WIFEXITED(ended) ? WEXITSTATUS(ended) : 2;
      status = status == 0 ? code : status;
    }
  }
  if (status != 0) {
    return status;
  }
  for (size_t index = 0; index < tensors.size(); ++index) {
    if (tensors[index].writable) {
      write_whole(file, regions[index].begin, tensors[index].bytes, tensors[index].file_offset);
    }
  }
  return 0;
}
