//! The structures and constants of libibverbs that kvpool uses.

#[cfg(all(test, feature = "rdma-sys"))]
mod layout;

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `struct ibv_device`, up to the last field that is read.
#[repr(C)]
pub(in crate::rdma) struct Device {
    ops: [*mut c_void; 2],
    pub(in crate::rdma) node_type: c_int,
    pub(in crate::rdma) transport_type: c_int,
    pub(in crate::rdma) name: [c_char; 64],
}

/// `struct ibv_context_ops`: a table of pointers; three are used.
#[repr(C)]
pub(in crate::rdma) struct ContextOps {
    before_poll: [*mut c_void; 11],
    pub(super) poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int,
    pub(super) req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
    before_post: [*mut c_void; 12],
    pub(super) post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    after_post: [*mut c_void; 6],
}

/// `struct ibv_context`, up to the last field that is read.
#[repr(C)]
pub(in crate::rdma) struct Context {
    device: *mut Device,
    pub(super) ops: ContextOps,
    cmd_fd: c_int,
    pub(in crate::rdma) async_fd: c_int,
    pub(in crate::rdma) num_comp_vectors: c_int,
}

/// `struct ibv_pd`, whose content is not read.
#[repr(C)]
pub(in crate::rdma) struct Pd {
    context: *mut Context,
}

/// `struct ibv_comp_channel`, up to the last field that is read.
#[repr(C)]
pub(in crate::rdma) struct Channel {
    context: *mut Context,
    pub(in crate::rdma) fd: c_int,
}

/// `struct ibv_cq`, up to the last field that is read.
#[repr(C)]
pub(in crate::rdma) struct Cq {
    pub(super) context: *mut Context,
}

/// `struct ibv_qp`, up to the last field that is read.
#[repr(C)]
pub(in crate::rdma) struct Qp {
    pub(super) context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut c_void,
    handle: u32,
    pub(in crate::rdma) qp_num: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(in crate::rdma) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(in crate::rdma) lkey: u32,
    pub(in crate::rdma) rkey: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct DeviceAttr {
    pub(in crate::rdma) fw_ver: [c_char; 64],
    pub(in crate::rdma) node_guid: u64,
    pub(in crate::rdma) sys_image_guid: u64,
    pub(in crate::rdma) max_mr_size: u64,
    pub(in crate::rdma) page_size_cap: u64,
    pub(in crate::rdma) vendor_id: u32,
    pub(in crate::rdma) vendor_part_id: u32,
    pub(in crate::rdma) hw_ver: u32,
    pub(in crate::rdma) max_qp: c_int,
    pub(in crate::rdma) max_qp_wr: c_int,
    pub(in crate::rdma) device_cap_flags: c_uint,
    pub(in crate::rdma) max_sge: c_int,
    pub(in crate::rdma) max_sge_rd: c_int,
    pub(in crate::rdma) max_cq: c_int,
    pub(in crate::rdma) max_cqe: c_int,
    pub(in crate::rdma) max_mr: c_int,
    pub(in crate::rdma) max_pd: c_int,
    pub(in crate::rdma) max_qp_rd_atom: c_int,
    pub(in crate::rdma) max_ee_rd_atom: c_int,
    pub(in crate::rdma) max_res_rd_atom: c_int,
    pub(in crate::rdma) max_qp_init_rd_atom: c_int,
    rest: [c_int; 16],
    pub(in crate::rdma) max_pkeys: u16,
    pub(in crate::rdma) local_ca_ack_delay: u8,
    pub(in crate::rdma) phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct PortAttr {
    pub(in crate::rdma) state: c_int,
    pub(in crate::rdma) max_mtu: c_int,
    pub(in crate::rdma) active_mtu: c_int,
    pub(in crate::rdma) gid_tbl_len: c_int,
    pub(in crate::rdma) port_cap_flags: u32,
    pub(in crate::rdma) max_msg_sz: u32,
    bad_pkey_cntr: u32,
    qkey_viol_cntr: u32,
    pkey_tbl_len: u16,
    pub(in crate::rdma) lid: u16,
    sm_lid: u16,
    lmc: u8,
    max_vl_num: u8,
    sm_sl: u8,
    subnet_timeout: u8,
    init_type_reply: u8,
    pub(in crate::rdma) active_width: u8,
    pub(in crate::rdma) active_speed: u8,
    phys_state: u8,
    pub(in crate::rdma) link_layer: u8,
    flags: u8,
    port_cap_flags2: u16,
}

/// `struct ibv_gid_entry`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct GidEntry {
    /// The union `ibv_gid` is aligned to eight bytes.
    pub(in crate::rdma) gid: Gid,
    pub(in crate::rdma) gid_index: u32,
    pub(in crate::rdma) port_num: u32,
    pub(in crate::rdma) gid_type: u32,
    pub(in crate::rdma) ndev_ifindex: u32,
}

/// `union ibv_gid`.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::rdma) struct Gid(pub(in crate::rdma) [u8; 16]);

/// `struct ibv_async_event`; the element is a pointer or a port number.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct AsyncEvent {
    pub(in crate::rdma) element: *mut Qp,
    pub(in crate::rdma) event_type: c_int,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct QpCap {
    pub(in crate::rdma) max_send_wr: u32,
    pub(in crate::rdma) max_recv_wr: u32,
    pub(in crate::rdma) max_send_sge: u32,
    pub(in crate::rdma) max_recv_sge: u32,
    pub(in crate::rdma) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(in crate::rdma) struct QpInitAttr {
    pub(in crate::rdma) qp_context: *mut c_void,
    pub(in crate::rdma) send_cq: *mut Cq,
    pub(in crate::rdma) recv_cq: *mut Cq,
    pub(in crate::rdma) srq: *mut c_void,
    pub(in crate::rdma) cap: QpCap,
    pub(in crate::rdma) qp_type: c_int,
    pub(in crate::rdma) sq_sig_all: c_int,
}

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct GlobalRoute {
    pub(in crate::rdma) dgid: Gid,
    pub(in crate::rdma) flow_label: u32,
    pub(in crate::rdma) sgid_index: u8,
    pub(in crate::rdma) hop_limit: u8,
    pub(in crate::rdma) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct AhAttr {
    pub(in crate::rdma) grh: GlobalRoute,
    pub(in crate::rdma) dlid: u16,
    pub(in crate::rdma) sl: u8,
    pub(in crate::rdma) src_path_bits: u8,
    pub(in crate::rdma) static_rate: u8,
    pub(in crate::rdma) is_global: u8,
    pub(in crate::rdma) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct QpAttr {
    pub(in crate::rdma) qp_state: c_int,
    cur_qp_state: c_int,
    pub(in crate::rdma) path_mtu: c_int,
    path_mig_state: c_int,
    qkey: u32,
    pub(in crate::rdma) rq_psn: u32,
    pub(in crate::rdma) sq_psn: u32,
    pub(in crate::rdma) dest_qp_num: u32,
    pub(in crate::rdma) qp_access_flags: c_uint,
    cap: QpCap,
    pub(in crate::rdma) ah_attr: AhAttr,
    alt_ah_attr: AhAttr,
    pub(in crate::rdma) pkey_index: u16,
    alt_pkey_index: u16,
    en_sqd_async_notify: u8,
    sq_draining: u8,
    pub(in crate::rdma) max_rd_atomic: u8,
    pub(in crate::rdma) max_dest_rd_atomic: u8,
    pub(in crate::rdma) min_rnr_timer: u8,
    pub(in crate::rdma) port_num: u8,
    pub(in crate::rdma) timeout: u8,
    pub(in crate::rdma) retry_cnt: u8,
    pub(in crate::rdma) rnr_retry: u8,
    alt_port_num: u8,
    alt_timeout: u8,
    rate_limit: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) struct Sge {
    pub(in crate::rdma) addr: u64,
    pub(in crate::rdma) length: u32,
    pub(in crate::rdma) lkey: u32,
}

/// `struct ibv_send_wr`, with its unions in the form that RDMA READ and WRITE take.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct SendWr {
    pub(in crate::rdma) wr_id: u64,
    pub(in crate::rdma) next: *mut SendWr,
    pub(in crate::rdma) sg_list: *mut Sge,
    pub(in crate::rdma) num_sge: c_int,
    pub(in crate::rdma) opcode: c_int,
    pub(in crate::rdma) send_flags: c_uint,
    pub(in crate::rdma) imm_data: u32,
    pub(in crate::rdma) remote_addr: u64,
    pub(in crate::rdma) rkey: u32,
    pub(in crate::rdma) rest_of_wr: [u32; 5],
    pub(in crate::rdma) qp_type: u32,
    pub(in crate::rdma) bind_or_tso: [u64; 6],
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::rdma) struct Wc {
    pub(in crate::rdma) wr_id: u64,
    pub(in crate::rdma) status: c_int,
    pub(in crate::rdma) opcode: c_int,
    pub(in crate::rdma) vendor_err: u32,
    pub(in crate::rdma) byte_len: u32,
    pub(in crate::rdma) imm_data: u32,
    pub(in crate::rdma) qp_num: u32,
    src_qp: u32,
    wc_flags: c_uint,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

/// Structures that start as all zeros, as in the library's examples.
///
/// # Safety
///
/// All zeros is a valid value of the type.
pub(in crate::rdma) unsafe trait Zeroed: Sized {
    /// All zeros.
    fn zeroed() -> Self {
        // SAFETY: guaranteed by the implementer of the trait.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! zeroed {
    ($($name:ident),*) => {
        $(
            // SAFETY: the fields are numbers and pointers.
            unsafe impl Zeroed for $name {}
        )*
    };
}
zeroed!(
    DeviceAttr, PortAttr, GidEntry, AsyncEvent, QpInitAttr, QpAttr, SendWr, Wc
);

pub(in crate::rdma) const TRANSPORT_IWARP: c_int = 1;
pub(in crate::rdma) const PORT_ACTIVE: c_int = 4;
/// From an unnamed enum, which the generated bindings omit. Software RoCE reports this link layer
/// and requires it for connections.
pub(in crate::rdma) const LINK_LAYER_ETHERNET: u8 = 2;
pub(in crate::rdma) const GID_TYPE_ROCE_V1: u32 = 1;
pub(in crate::rdma) const GID_TYPE_ROCE_V2: u32 = 2;
pub(in crate::rdma) const EVENT_CQ_ERR: c_int = 0;
pub(in crate::rdma) const EVENT_QP_FATAL: c_int = 1;
pub(in crate::rdma) const EVENT_QP_REQ_ERR: c_int = 2;
pub(in crate::rdma) const EVENT_QP_ACCESS_ERR: c_int = 3;
pub(in crate::rdma) const EVENT_DEVICE_FATAL: c_int = 8;
pub(in crate::rdma) const ACCESS_LOCAL_WRITE: c_uint = 1;
pub(in crate::rdma) const ACCESS_REMOTE_WRITE: c_uint = 1 << 1;
pub(in crate::rdma) const ACCESS_REMOTE_READ: c_uint = 1 << 2;
pub(in crate::rdma) const ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;
pub(in crate::rdma) const QPT_RC: c_int = 2;
pub(in crate::rdma) const QPS_INIT: c_int = 1;
pub(in crate::rdma) const QPS_RTR: c_int = 2;
pub(in crate::rdma) const QPS_RTS: c_int = 3;
pub(in crate::rdma) const QPS_ERR: c_int = 6;
pub(in crate::rdma) const QP_STATE: c_int = 1;
pub(in crate::rdma) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(in crate::rdma) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(in crate::rdma) const QP_PORT: c_int = 1 << 5;
pub(in crate::rdma) const QP_AV: c_int = 1 << 7;
pub(in crate::rdma) const QP_PATH_MTU: c_int = 1 << 8;
pub(in crate::rdma) const QP_TIMEOUT: c_int = 1 << 9;
pub(in crate::rdma) const QP_RETRY_CNT: c_int = 1 << 10;
pub(in crate::rdma) const QP_RNR_RETRY: c_int = 1 << 11;
pub(in crate::rdma) const QP_RQ_PSN: c_int = 1 << 12;
pub(in crate::rdma) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(in crate::rdma) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(in crate::rdma) const QP_SQ_PSN: c_int = 1 << 16;
pub(in crate::rdma) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(in crate::rdma) const QP_DEST_QPN: c_int = 1 << 20;
pub(in crate::rdma) const WR_RDMA_WRITE: c_int = 0;
pub(in crate::rdma) const WR_RDMA_READ: c_int = 4;
pub(in crate::rdma) const SEND_SIGNALED: c_uint = 1 << 1;
pub(in crate::rdma) const WC_RDMA_WRITE: c_int = 1;
pub(in crate::rdma) const WC_RDMA_READ: c_int = 2;
pub(in crate::rdma) const WC_SUCCESS: c_int = 0;
pub(in crate::rdma) const WC_WR_FLUSH_ERR: c_int = 5;
