//! The functions of libibverbs that kvpool uses, loaded at run time.
//!
//! Nothing is needed at build time and nothing is linked. On a host without the library a process
//! starts as usual, and loading fails here. `types/layout.rs` compares every structure and constant
//! with the C headers, under the feature `rdma-sys`.
//!
//! ADR 0012 says why kvpool has its own binding.

// UNSAFETY: foreign functions behind pointers. The signatures and structures are those of the
// library's stable ABI. Callers keep the library's rules for arguments.
#![allow(unsafe_code, reason = "calls a C library that is loaded at run time")]

mod types;

pub(super) use types::*;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

const NAME: &CStr = c"libibverbs.so.1";

macro_rules! library {
    ($($(#[$doc:meta])* $field:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of the library, which stays loaded for the life of the process.
        pub(in crate::rdma) struct Library {
            $($(#[$doc])* pub(in crate::rdma) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// Registers a range of a dmabuf; missing before rdma-core 34.
            pub(in crate::rdma) reg_dmabuf_mr: Option<RegDmabuf>,
            /// Tells whether forks are safe; missing before rdma-core 35.
            is_fork_initialized: Option<IsForkInitialized>,
        }

        impl Library {
            /// Loads the library. Fails with the loader's message.
            pub(in crate::rdma) fn load() -> Result<Self, String> {
                // SAFETY: the name is a C string; the library's initialisers are trusted like those
                // of any linked library.
                let handle = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                let Some(handle) = NonNull::new(handle) else {
                    return Err(loader_error());
                };
                Ok(Self {
                    $($field: {
                        let symbol = find(handle, $symbol).ok_or_else(loader_error)?;
                        // SAFETY: the symbol is the function of this name. The library keeps its
                        // signature as long as its version number is 1.
                        unsafe {
                            std::mem::transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($argument),*) -> $result,
                            >(symbol)
                        }
                    },)*
                    reg_dmabuf_mr: find(handle, c"ibv_reg_dmabuf_mr").map(|symbol| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<NonNull<c_void>, RegDmabuf>(symbol) }
                    }),
                    is_fork_initialized: find(handle, c"ibv_is_fork_initialized").map(|symbol| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<NonNull<c_void>, IsForkInitialized>(symbol) }
                    }),
                })
            }
        }
    };
}

/// Protection domain, offset in the dmabuf, length, address for work requests, descriptor, access.
pub(super) type RegDmabuf = unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;

/// Returns a value of `enum ibv_fork_status`.
type IsForkInitialized = unsafe extern "C" fn() -> c_int;

/// `IBV_FORK_DISABLED`: after a fork, this process's next write moves it off the registered pages.
const FORK_DISABLED: c_int = 0;

impl Library {
    /// Keeps registered memory with this process when it forks, as Python programs do. Since Linux
    /// 5.12 the kernel copies such pages for the child, and the library reports that nothing is
    /// needed. On older kernels the library keeps the pages from the child. This must run before
    /// the first registration.
    pub(in crate::rdma) fn prepare_for_forks(&self) -> Result<(), String> {
        if let Some(is_initialized) = self.is_fork_initialized {
            // SAFETY: the function takes no arguments and only reads the library's state.
            if unsafe { is_initialized() } != FORK_DISABLED {
                return Ok(());
            }
        }
        // SAFETY: the function takes no arguments. It may be called at any time, and fails when it
        // is too late.
        match unsafe { (self.fork_init)() } {
            0 => Ok(()),
            code => Err(std::io::Error::from_raw_os_error(code.abs()).to_string()),
        }
    }
}

library! {
    fork_init: c"ibv_fork_init" () -> c_int;
    get_device_list: c"ibv_get_device_list" (*mut c_int) -> *mut *mut Device;
    free_device_list: c"ibv_free_device_list" (*mut *mut Device) -> ();
    open_device: c"ibv_open_device" (*mut Device) -> *mut Context;
    close_device: c"ibv_close_device" (*mut Context) -> c_int;
    query_device: c"ibv_query_device" (*mut Context, *mut DeviceAttr) -> c_int;
    query_port: c"ibv_query_port" (*mut Context, u8, *mut PortAttr) -> c_int;
    /// Context, port, index, entry, flags, size of the entry.
    query_gid: c"_ibv_query_gid_ex" (*mut Context, u32, u32, *mut GidEntry, u32, usize) -> c_int;
    alloc_pd: c"ibv_alloc_pd" (*mut Context) -> *mut Pd;
    dealloc_pd: c"ibv_dealloc_pd" (*mut Pd) -> c_int;
    /// Protection domain, address, length, the address that work requests name, access.
    reg_mr: c"ibv_reg_mr_iova2" (*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    dereg_mr: c"ibv_dereg_mr" (*mut Mr) -> c_int;
    create_channel: c"ibv_create_comp_channel" (*mut Context) -> *mut Channel;
    destroy_channel: c"ibv_destroy_comp_channel" (*mut Channel) -> c_int;
    create_cq: c"ibv_create_cq" (*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut Cq;
    destroy_cq: c"ibv_destroy_cq" (*mut Cq) -> c_int;
    get_cq_event: c"ibv_get_cq_event" (*mut Channel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events: c"ibv_ack_cq_events" (*mut Cq, c_uint) -> ();
    get_async_event: c"ibv_get_async_event" (*mut Context, *mut AsyncEvent) -> c_int;
    ack_async_event: c"ibv_ack_async_event" (*mut AsyncEvent) -> ();
    create_qp: c"ibv_create_qp" (*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp: c"ibv_modify_qp" (*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp: c"ibv_destroy_qp" (*mut Qp) -> c_int;
}

/// Posts a chain of work requests. Returns an errno; on an error `bad` names the first request that
/// was not accepted.
///
/// # Safety
///
/// `qp` lives. The chain and its lists are valid during the call. The memory that it names stays
/// valid until the work has ended.
pub(super) unsafe fn post_send(qp: *mut Qp, first: *mut SendWr, bad: *mut *mut SendWr) -> c_int {
    // SAFETY: the queue pair lives.
    let context = unsafe { (*qp).context };
    // SAFETY: the context lives as long as the queue pair, and its operations never change.
    let post = unsafe { (*context).ops.post_send };
    // SAFETY: guaranteed by the caller.
    unsafe { post(qp, first, bad) }
}

/// Takes up to `room` completions. Negative on failure.
///
/// # Safety
///
/// `cq` lives, and `into` has room for `room` completions.
pub(super) unsafe fn poll_cq(cq: *mut Cq, room: c_int, into: *mut Wc) -> c_int {
    // SAFETY: the queue lives.
    let context = unsafe { (*cq).context };
    // SAFETY: the context lives as long as the queue, and its operations never change.
    let poll = unsafe { (*context).ops.poll_cq };
    // SAFETY: guaranteed by the caller.
    unsafe { poll(cq, room, into) }
}

/// Requests an event for the next completion.
///
/// # Safety
///
/// `cq` lives.
pub(super) unsafe fn req_notify_cq(cq: *mut Cq) -> c_int {
    // SAFETY: the queue lives.
    let context = unsafe { (*cq).context };
    // SAFETY: the context lives as long as the queue, and its operations never change.
    let request = unsafe { (*context).ops.req_notify_cq };
    // SAFETY: guaranteed by the caller.
    unsafe { request(cq, 0) }
}

/// The name of a device.
///
/// # Safety
///
/// `device` is an entry of a list that has not been freed.
pub(super) unsafe fn device_name(device: *mut Device) -> String {
    // SAFETY: guaranteed by the caller; the name is an array inside the entry.
    let name = unsafe { &raw const (*device).name };
    // SAFETY: the library terminates the name with a zero inside the array.
    unsafe { CStr::from_ptr(name.cast::<c_char>()) }
        .to_string_lossy()
        .into_owned()
}

fn find(handle: NonNull<c_void>, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the handle came from `dlopen` and is never closed.
    NonNull::new(unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) })
}

fn loader_error() -> String {
    // SAFETY: takes no arguments; the result is null or a string of this thread, which is copied at
    // once.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "loading failed without an error message".to_owned();
    }
    // SAFETY: not null, so a C string that stays valid until this thread's next call.
    unsafe { CStr::from_ptr(error) }
        .to_string_lossy()
        .into_owned()
}
