# zcomm_floor(NAME BELOW floors...): src/NAME as OBJECT library zcomm_NAME.
#
# Headers are included as "NAME/file.hpp", or "NAME/folder/file.hpp". Each floor has an include root of its own that
# holds nothing but a link to its folder, and passes on those of the floors below: an include that points up or
# sideways does not compile. Sources are found in all folders of the floor.
function(zcomm_floor name)
  cmake_parse_arguments(ARG "" "" "BELOW" ${ARGN})
  set(root ${CMAKE_BINARY_DIR}/floors/${name})
  file(MAKE_DIRECTORY ${root})
  file(CREATE_LINK ${CMAKE_SOURCE_DIR}/src/${name} ${root}/${name} SYMBOLIC)

  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${name}/*.cpp)
  zcomm_choose_backends(${name} sources)
  zcomm_apply_isa(sources)
  add_library(zcomm_${name} OBJECT ${sources})
  target_include_directories(zcomm_${name} PUBLIC ${CMAKE_SOURCE_DIR}/include ${root})
  target_link_libraries(zcomm_${name} PUBLIC zcomm_flags Threads::Threads)
  foreach(below IN LISTS ARG_BELOW)
    target_include_directories(zcomm_${name} PUBLIC ${CMAKE_BINARY_DIR}/floors/${below})
  endforeach()
  zcomm_compile_together(zcomm_${name})
  set_property(GLOBAL APPEND PROPERTY ZCOMM_FLOORS ${name})
endfunction()

# Links all floors of the core into `target` (an executable or module): without the doubles, which are for tests.
function(zcomm_link_core target)
  get_property(floors GLOBAL PROPERTY ZCOMM_FLOORS)
  list(REMOVE_ITEM floors doubles)
  foreach(floor IN LISTS floors)
    target_link_libraries(${target} PRIVATE zcomm_${floor})
  endforeach()
  zcomm_link_backend_libraries(${target})
endfunction()

# Compiles the files of a folder together, but for those with flags of their own: half of the processor time. Their
# unnamed namespaces have different names, then. A build without it shows that each file includes what it needs.
function(zcomm_compile_together target)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    cmake_path(GET source PARENT_PATH folder)
    if(folder)
      string(MAKE_C_IDENTIFIER "${folder}" group)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${ZCOMM_UNITY} UNITY_BUILD_MODE GROUP)
  if(ZCOMM_UNITY)  # GCC takes a file that is included for a header
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()
