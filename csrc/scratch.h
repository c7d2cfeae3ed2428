// Memory that is reused from call to call: it grows to what the largest call needed and keeps that.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace embcache {

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data_); }

  // Room for n objects; what was in it before is lost.
  template <class T>
  T* get(int64_t n) {
    const size_t need = (size_t)n * sizeof(T);
    if (need > size_) grow(need + need / 4);
    return (T*)data_;
  }

 private:
  void grow(size_t bytes) {
    free(data_);
    data_ = nullptr;
    size_ = 0;
    const size_t huge = (size_t)2 << 20, align = bytes >= huge ? huge : 64;
    bytes = (bytes + align - 1) / align * align;
    if (posix_memalign(&data_, align, bytes)) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (align == huge) madvise(data_, bytes, MADV_HUGEPAGE);  // only a hint
#endif
    size_ = bytes;
  }

  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace embcache
