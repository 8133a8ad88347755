# Optional backends. A missing backend is another file (no_cuda*.cpp), not an #ifdef.

set(ZCOMM_HAVE_CUDA OFF)
if(NOT ZCOMM_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    # Ours below unless the user has said (CMAKE_CUDA_ARCHITECTURES=native: for the GPU of this machine only).
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
      set(default_architectures ON)
      set(CMAKE_CUDA_ARCHITECTURES 80)
    endif()
    enable_language(CUDA)
    if(default_architectures)  # machine code of each generation; the last one's PTX serves those to come
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
      else()
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
      endif()
    endif()
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12)
      set(CMAKE_CUDA_STANDARD 20)
      if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 knows nvcc's C++17 at most
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
      endif()
      find_package(CUDAToolkit REQUIRED)
      set(ZCOMM_HAVE_CUDA ON)
    elseif(ZCOMM_CUDA STREQUAL "ON")
      message(FATAL_ERROR "ZCOMM_CUDA=ON needs nvcc 12 or newer (C++20); ${CMAKE_CUDA_COMPILER} is "
                          "${CMAKE_CUDA_COMPILER_VERSION}")
    else()
      message(STATUS "zcomm: nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12 (no C++20): without CUDA")
    endif()
  elseif(ZCOMM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ZCOMM_CUDA=ON, but no CUDA compiler was found (set CMAKE_CUDA_COMPILER or PATH)")
  endif()
endif()

message(STATUS "zcomm: CUDA ${ZCOMM_HAVE_CUDA}")

# Replaces the stub by the backend, or leaves the backend out.
function(zcomm_choose_backends floor sources_var)
  set(sources ${${sources_var}})
  if((floor STREQUAL "device" OR floor STREQUAL "optim") AND ZCOMM_HAVE_CUDA)
    list(FILTER sources EXCLUDE REGEX "/no_cuda[a-z_]*\\.cpp$")
    file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${floor}/*.cu)
    list(APPEND sources ${cuda_sources})
  endif()
  set(${sources_var} ${sources} PARENT_SCOPE)
endfunction()

function(zcomm_link_backend_libraries target)
  target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})  # libnccl is loaded at run time
  if(ZCOMM_HAVE_CUDA)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  endif()
endfunction()
