# Flags of every C++ file. No -march=native anywhere: files named *_avx2.cpp, *_avx512.cpp and *_avx512_bf16.cpp are
# built for that instruction set and chosen at run time.

add_library(zcomm_flags INTERFACE)
target_compile_options(zcomm_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wnon-virtual-dtor>
  # The bitwise contract: every a*b+c rounds twice, on every CPU. The other two only free the vectoriser
  # (no errno from sqrt, no trap handlers); they do not change results.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-fno-math-errno;-fno-trapping-math>
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>)
if(ZCOMM_WERROR)
  target_compile_options(zcomm_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>
                                               $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
# Sanitizers check each access: -O1 compiles in half the time and runs the tests as fast, and lines suffice for stacks.
# Directory flags: options of a target come after them.
set(ZCOMM_KERNEL_LEVEL -O3)
if(ZCOMM_SANITIZE)
  set(ZCOMM_KERNEL_LEVEL -O1)
  string(APPEND CMAKE_CXX_FLAGS " -O1 -g1 -fsanitize=${ZCOMM_SANITIZE} -fno-omit-frame-pointer")
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO -DNDEBUG)
endif()

set(ZCOMM_ISA_avx2 -mavx2 -mf16c)
set(ZCOMM_ISA_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c -mprefer-vector-width=512)
set(ZCOMM_ISA_avx512_bf16 ${ZCOMM_ISA_avx512} -mavx512bf16 -mavx512vbmi)

# Sets per-file flags on x86 and drops the files elsewhere.
function(zcomm_apply_isa sources_var)
  set(kept)
  foreach(source IN LISTS ${sources_var})
    if(source MATCHES "_(avx2|avx512|avx512_bf16)\\.cpp$")
      set(isa ${CMAKE_MATCH_1})  # the next MATCHES overwrites it
      if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        continue()
      endif()
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${ZCOMM_ISA_${isa}};${ZCOMM_KERNEL_LEVEL}")
    elseif(source MATCHES "_plain\\.cpp$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${ZCOMM_KERNEL_LEVEL}")
    endif()
    list(APPEND kept ${source})
  endforeach()
  set(${sources_var} ${kept} PARENT_SCOPE)
endfunction()
