//! Compares the hand-written structures with those generated from the C headers.

use super as ours;
use rdma_sys as theirs;
use std::mem::offset_of;

/// Checks that fields lie where the header has them. A `whole` structure must also have the
/// header's size.
macro_rules! same {
    (whole $ours:ident, $theirs:ident: $($field:ident $(as $other:ident)?),*) => {
        assert_eq!(size_of::<ours::$ours>(), size_of::<theirs::$theirs>(), stringify!($ours));
        assert_eq!(align_of::<ours::$ours>(), align_of::<theirs::$theirs>(), stringify!($ours));
        same!(part $ours, $theirs: $($field $(as $other)?),*);
    };
    (part $ours:ident, $theirs:ident: $($field:ident $(as $other:ident)?),*) => {
        $(assert_eq!(
            offset_of!(ours::$ours, $field),
            same!(@offset $theirs, $field $($other)?),
            concat!(stringify!($ours), ".", stringify!($field))
        );)*
    };
    (@offset $theirs:ident, $field:ident) => { offset_of!(theirs::$theirs, $field) };
    (@offset $theirs:ident, $field:ident $other:ident) => { offset_of!(theirs::$theirs, $other) };
}

#[test]
fn structures_made_here_match_the_headers() {
    same!(whole DeviceAttr, ibv_device_attr: fw_ver, node_guid, sys_image_guid, max_mr_size,
        page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags,
        max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom,
        max_res_rd_atom, max_qp_init_rd_atom, rest as max_ee_init_rd_atom, max_pkeys,
        local_ca_ack_delay, phys_port_cnt);
    same!(whole PortAttr, ibv_port_attr: state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags,
        max_msg_sz, bad_pkey_cntr, qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num,
        sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer,
        flags, port_cap_flags2);
    same!(whole GidEntry, ibv_gid_entry: gid, gid_index, port_num, gid_type, ndev_ifindex);
    same!(whole Gid, ibv_gid:);
    same!(whole AsyncEvent, ibv_async_event: element, event_type);
    same!(whole QpCap, ibv_qp_cap: max_send_wr, max_recv_wr, max_send_sge, max_recv_sge,
        max_inline_data);
    same!(whole QpInitAttr, ibv_qp_init_attr: qp_context, send_cq, recv_cq, srq, cap, qp_type,
        sq_sig_all);
    same!(whole GlobalRoute, ibv_global_route: dgid, flow_label, sgid_index, hop_limit,
        traffic_class);
    same!(whole AhAttr, ibv_ah_attr: grh, dlid, sl, src_path_bits, static_rate, is_global, port_num);
    same!(whole QpAttr, ibv_qp_attr: qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn,
        sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index,
        en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num,
        timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit);
    same!(whole Sge, ibv_sge: addr, length, lkey);
    same!(whole SendWr, ibv_send_wr: wr_id, next, sg_list, num_sge, opcode, send_flags,
        imm_data as imm_data_invalidated_rkey_union, remote_addr as wr, qp_type,
        bind_or_tso as bind_mw_tso_union);
    let wr = offset_of!(theirs::ibv_send_wr, wr);
    assert_eq!(
        offset_of!(ours::SendWr, rkey),
        wr + offset_of!(theirs::rdma_t, rkey)
    );
    same!(whole Wc, ibv_wc: wr_id, status, opcode, vendor_err, byte_len,
        imm_data as imm_data_invalidated_rkey_union, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
        dlid_path_bits);
    same!(whole Mr, ibv_mr: context, pd, addr, length, handle, lkey, rkey);
}

#[test]
fn structures_made_by_the_library_start_as_in_the_headers() {
    same!(part Device, ibv_device: ops as _ops, node_type, transport_type, name);
    same!(part Context, ibv_context: device, ops, cmd_fd, async_fd, num_comp_vectors);
    same!(whole ContextOps, ibv_context_ops: before_poll as _compat_query_device, poll_cq,
        req_notify_cq, before_post as _compat_cq_event, post_send, after_post as post_recv);
    same!(part Pd, ibv_pd: context);
    same!(part Channel, ibv_comp_channel: context, fd);
    same!(part Cq, ibv_cq: context);
    same!(part Qp, ibv_qp: context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num);
}

macro_rules! equal {
    ($($ours:ident = $theirs:expr),* $(,)?) => {
        $(assert_eq!(i64::from(ours::$ours), i64::from($theirs), stringify!($ours));)*
    };
}

#[test]
fn constants_match_the_headers() {
    use theirs::{
        ibv_access_flags, ibv_event_type, ibv_port_state, ibv_qp_attr_mask, ibv_qp_state,
        ibv_qp_type, ibv_send_flags, ibv_transport_type, ibv_wc_opcode, ibv_wc_status,
        ibv_wr_opcode,
    };
    equal! {
        TRANSPORT_IWARP = ibv_transport_type::IBV_TRANSPORT_IWARP,
        PORT_ACTIVE = ibv_port_state::IBV_PORT_ACTIVE,
        GID_TYPE_ROCE_V1 = theirs::IBV_GID_TYPE_ROCE_V1,
        GID_TYPE_ROCE_V2 = theirs::IBV_GID_TYPE_ROCE_V2,
        EVENT_CQ_ERR = ibv_event_type::IBV_EVENT_CQ_ERR as u32,
        EVENT_QP_FATAL = ibv_event_type::IBV_EVENT_QP_FATAL as u32,
        EVENT_QP_REQ_ERR = ibv_event_type::IBV_EVENT_QP_REQ_ERR as u32,
        EVENT_QP_ACCESS_ERR = ibv_event_type::IBV_EVENT_QP_ACCESS_ERR as u32,
        EVENT_DEVICE_FATAL = ibv_event_type::IBV_EVENT_DEVICE_FATAL as u32,
        ACCESS_LOCAL_WRITE = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0,
        ACCESS_REMOTE_WRITE = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
        ACCESS_REMOTE_READ = ibv_access_flags::IBV_ACCESS_REMOTE_READ.0,
        ACCESS_RELAXED_ORDERING = ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0,
        QPT_RC = ibv_qp_type::IBV_QPT_RC,
        QPS_INIT = ibv_qp_state::IBV_QPS_INIT,
        QPS_RTR = ibv_qp_state::IBV_QPS_RTR,
        QPS_RTS = ibv_qp_state::IBV_QPS_RTS,
        QPS_ERR = ibv_qp_state::IBV_QPS_ERR,
        QP_STATE = ibv_qp_attr_mask::IBV_QP_STATE.0,
        QP_ACCESS_FLAGS = ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS.0,
        QP_PKEY_INDEX = ibv_qp_attr_mask::IBV_QP_PKEY_INDEX.0,
        QP_PORT = ibv_qp_attr_mask::IBV_QP_PORT.0,
        QP_AV = ibv_qp_attr_mask::IBV_QP_AV.0,
        QP_PATH_MTU = ibv_qp_attr_mask::IBV_QP_PATH_MTU.0,
        QP_TIMEOUT = ibv_qp_attr_mask::IBV_QP_TIMEOUT.0,
        QP_RETRY_CNT = ibv_qp_attr_mask::IBV_QP_RETRY_CNT.0,
        QP_RNR_RETRY = ibv_qp_attr_mask::IBV_QP_RNR_RETRY.0,
        QP_RQ_PSN = ibv_qp_attr_mask::IBV_QP_RQ_PSN.0,
        QP_MAX_QP_RD_ATOMIC = ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC.0,
        QP_MIN_RNR_TIMER = ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0,
        QP_SQ_PSN = ibv_qp_attr_mask::IBV_QP_SQ_PSN.0,
        QP_MAX_DEST_RD_ATOMIC = ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC.0,
        QP_DEST_QPN = ibv_qp_attr_mask::IBV_QP_DEST_QPN.0,
        WR_RDMA_WRITE = ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        WR_RDMA_READ = ibv_wr_opcode::IBV_WR_RDMA_READ,
        SEND_SIGNALED = ibv_send_flags::IBV_SEND_SIGNALED.0,
        WC_RDMA_WRITE = ibv_wc_opcode::IBV_WC_RDMA_WRITE,
        WC_RDMA_READ = ibv_wc_opcode::IBV_WC_RDMA_READ,
        WC_SUCCESS = ibv_wc_status::IBV_WC_SUCCESS,
        WC_WR_FLUSH_ERR = ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
    }
}

#[test]
fn statuses_are_named_as_in_the_headers() {
    use crate::rdma::work::{Fault, name_of_status};
    use theirs::ibv_wc_status as status;
    for (number, name, fault) in [
        (status::IBV_WC_LOC_LEN_ERR, "LOC_LEN_ERR", Fault::Local),
        (status::IBV_WC_LOC_QP_OP_ERR, "LOC_QP_OP_ERR", Fault::Local),
        (status::IBV_WC_LOC_PROT_ERR, "LOC_PROT_ERR", Fault::Local),
        (status::IBV_WC_WR_FLUSH_ERR, "WR_FLUSH_ERR", Fault::Flushed),
        (status::IBV_WC_BAD_RESP_ERR, "BAD_RESP_ERR", Fault::Remote),
        (
            status::IBV_WC_LOC_ACCESS_ERR,
            "LOC_ACCESS_ERR",
            Fault::Local,
        ),
        (
            status::IBV_WC_REM_INV_REQ_ERR,
            "REM_INV_REQ_ERR",
            Fault::Remote,
        ),
        (
            status::IBV_WC_REM_ACCESS_ERR,
            "REM_ACCESS_ERR",
            Fault::Remote,
        ),
        (status::IBV_WC_REM_OP_ERR, "REM_OP_ERR", Fault::Remote),
        (status::IBV_WC_RETRY_EXC_ERR, "RETRY_EXC_ERR", Fault::Path),
        (
            status::IBV_WC_RNR_RETRY_EXC_ERR,
            "RNR_RETRY_EXC_ERR",
            Fault::Path,
        ),
        (
            status::IBV_WC_REM_INV_RD_REQ_ERR,
            "REM_INV_RD_REQ_ERR",
            Fault::Remote,
        ),
        (status::IBV_WC_REM_ABORT_ERR, "REM_ABORT_ERR", Fault::Remote),
        (
            status::IBV_WC_RESP_TIMEOUT_ERR,
            "RESP_TIMEOUT_ERR",
            Fault::Path,
        ),
        (status::IBV_WC_GENERAL_ERR, "GENERAL_ERR", Fault::Local),
        (status::IBV_WC_FATAL_ERR, "FATAL_ERR", Fault::Local),
    ] {
        let number = i32::try_from(number).unwrap();
        assert_eq!(name_of_status(number), (name, fault));
    }
}
