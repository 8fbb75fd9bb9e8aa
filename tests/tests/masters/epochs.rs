//! Invariant 4: one leader writes, and a data request names the epoch and the incarnation that it
//! relies on.

use kvpool_proto as proto;
use kvpool_tests::blocks::{bytes_of, key, put_all};
use kvpool_tests::daemon::Daemon;
use kvpool_tests::grants::{Control, Granted};
use kvpool_tests::raw::Port;
use kvpool_tests::{Cluster, Options};
use kvpool_types::wire::data::{Meta, ReadItem, ReadRequest, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::wire::keys;
use kvpool_types::{Checksum, Code, Epoch, Extent, Grant, Incarnation, Length, Offset};

const LENGTH: u64 = 4096;

fn write(port: &mut Port<std::net::TcpStream>, life: Incarnation, grant: Grant) -> Code {
    let request = WriteRequest {
        incarnation: life,
        grants: vec![grant],
    };
    let payload = vec![0xee; usize::try_from(request.payload_bytes().unwrap()).unwrap()];
    let codes = port
        .codes(Op::Write, grant.epoch, &request.to_bytes(), &payload)
        .unwrap();
    codes[0]
}

fn read(
    port: &mut Port<std::net::TcpStream>,
    epoch: Epoch,
    life: Incarnation,
    extent: Extent,
    length: u64,
) -> Code {
    let item = ReadItem {
        extent,
        from: Offset(0),
        length: Length(length),
        right: None,
    };
    let request = ReadRequest {
        incarnation: life,
        items: vec![item],
    };
    port.codes(Op::Read, epoch, &request.to_bytes(), &[])
        .unwrap()[0]
}

async fn reserved(cluster: &Cluster) -> (Control, Granted, Port<std::net::TcpStream>) {
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let granted = control.reserve(&key(1), LENGTH, 60_000).await.unwrap();
    let mut port = Port::open(&granted.data_address).unwrap();
    port.hello(control.cluster).unwrap();
    (control, granted, port)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_is_refused_unless_every_part_of_its_grant_is_right() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let (control, granted, mut port) = reserved(&cluster).await;
    let Granted {
        grant,
        incarnation: life,
        ..
    } = granted;
    let mac = {
        let mut mac = grant.mac;
        mac[3] ^= 1;
        mac
    };
    let moved = Extent {
        offset: Offset(grant.extent.offset.0 + 64),
        ..grant.extent
    };
    let longer = Extent {
        length: Length(LENGTH + 1),
        ..grant.extent
    };
    let far = Extent {
        offset: Offset(1 << 40),
        ..grant.extent
    };
    assert_eq!(
        write(&mut port, life, Grant { mac, ..grant }),
        Code::GrantRefused
    );
    assert_eq!(
        write(
            &mut port,
            life,
            Grant {
                extent: moved,
                ..grant
            }
        ),
        Code::GrantRefused
    );
    assert_eq!(
        write(
            &mut port,
            life,
            Grant {
                extent: longer,
                ..grant
            }
        ),
        Code::GrantRefused
    );
    let refused = write(
        &mut port,
        life,
        Grant {
            extent: far,
            ..grant
        },
    );
    assert!(
        matches!(refused, Code::GrantRefused | Code::OutOfRange),
        "{refused}"
    );
    assert_eq!(
        write(&mut port, Incarnation(7), grant),
        Code::WrongIncarnation
    );
    let stale = Grant {
        epoch: Epoch(control.epoch.0 - 1),
        ..grant
    };
    assert_eq!(write(&mut port, life, stale), Code::StaleEpoch);
    assert_eq!(write(&mut port, life, grant), Code::Ok);
    assert_eq!(write(&mut port, life, grant), Code::AlreadyWritten);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_is_refused_outside_its_extent_its_life_and_its_epoch() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..1, 4096).await.unwrap();
    let (control, granted, mut port) = reserved(&cluster).await;
    let block = client.describe(&[key(0)]).await.unwrap().remove(0).unwrap();
    let extent = block.replicas[0].extent;
    let life = granted.incarnation;
    let epoch = control.epoch;
    assert_eq!(read(&mut port, epoch, life, extent, LENGTH), Code::Ok);
    assert_eq!(
        read(&mut port, epoch, life, extent, LENGTH + 1),
        Code::OutOfRange
    );
    let beyond = Extent {
        offset: Offset(1 << 40),
        ..extent
    };
    assert_ne!(read(&mut port, epoch, life, beyond, LENGTH), Code::Ok);
    let wider = Extent {
        length: Length(LENGTH * 2),
        ..extent
    };
    assert_ne!(read(&mut port, epoch, life, wider, LENGTH * 2), Code::Ok);
    assert_eq!(
        read(&mut port, epoch, Incarnation(7), extent, LENGTH),
        Code::WrongIncarnation
    );
    assert_eq!(
        read(&mut port, Epoch(epoch.0 - 1), life, extent, LENGTH),
        Code::StaleEpoch
    );
    // A granted but unwritten extent is not a block.
    assert_ne!(
        read(&mut port, epoch, life, granted.grant.extent, LENGTH),
        Code::Ok
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_grants_of_a_term_end_with_it() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    let (control, granted, mut port) = reserved(&cluster).await;
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    let mut next = Control::connect(&cluster.master_url()).await.unwrap();
    assert_eq!(next.cluster, control.cluster);
    assert!(next.epoch > control.epoch);
    assert_eq!(
        write(&mut port, granted.incarnation, granted.grant),
        Code::StaleEpoch
    );
    let code = next.commit(&key(1), &granted, Checksum(0)).await.unwrap();
    assert_eq!(code, Code::GrantEnded);
    // Versions are never given twice, so the old grant cannot pass for a new one.
    let again = next.reserve(&key(1), LENGTH, 60_000).await.unwrap();
    assert!(again.grant.id > granted.grant.id);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_refuses_whoever_knows_a_later_term_or_another_pool() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let ask = |caller: proto::Caller| proto::ExistRequest {
        caller: Some(caller),
        keys: keys::pack([&key(1)]).into(),
        no_lease: true,
    };
    let caller = control.caller().unwrap();
    let later = proto::Caller {
        epoch: caller.epoch + 1,
        ..caller.clone()
    };
    let stranger = proto::Caller {
        cluster_id: vec![9; 16].into(),
        ..caller
    };
    for (caller, expected) in [(later, Code::NotLeader), (stranger, Code::WrongCluster)] {
        let status = control.raw().exist(ask(caller)).await.unwrap_err();
        let code = status
            .metadata()
            .get(proto::CODE_METADATA)
            .unwrap()
            .to_str()
            .unwrap();
        assert_eq!(code, expected.to_wire().to_string());
        let says_what_to_do = status.message().contains("must connect anew");
        assert_eq!(says_what_to_do, expected == Code::WrongCluster);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_masters_cannot_share_their_data() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let data = cluster
        .directory()
        .join("master-data")
        .display()
        .to_string();
    let flags = [
        "--listen",
        "127.0.0.1:0",
        "--http-listen",
        "127.0.0.1:0",
        "--data-dir",
        &data,
    ];
    let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let error = Daemon::start("kvmaster", cluster.directory(), "second", &flags).unwrap_err();
    assert!(
        error.to_string().contains("in use by another kvmaster"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_incarnation_never_serves_the_blocks_of_the_old() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..20, 10_000).await.unwrap();
    cluster.nodes[0].kill().unwrap();
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    cluster
        .wait_for("the old blocks' end", || Ok(cluster.gauge("blocks")? == 0))
        .unwrap();
    for number in 0..20 {
        assert_eq!(client.get(&key(number)).await.unwrap(), None);
    }
    put_all(&client, 0..20, 10_000).await.unwrap();
    assert_eq!(
        client.get(&key(7)).await.unwrap(),
        Some(bytes_of(&key(7), 10_000))
    );
}

/// The token is of that term's clock, and could match a lease of this term.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_of_an_earlier_term_is_neither_renewed_nor_released() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    let before = Control::connect(&cluster.master_url()).await.unwrap();
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 1..2, 4096).await.unwrap();
    let mut now = Control::connect(&cluster.master_url()).await.unwrap();
    let keys = bytes::Bytes::from(keys::pack(&[key(1)]));
    let exist = proto::ExistRequest {
        caller: now.caller(),
        keys: keys.clone(),
        no_lease: false,
    };
    let leased = now.raw().exist(exist).await.unwrap().into_inner();
    let mut token = leased.lease.unwrap().token;
    for (caller, code) in [
        (before.caller(), Code::LeaseEnded),
        (now.caller(), Code::Ok),
    ] {
        let renew = proto::RenewRequest {
            caller: caller.clone(),
            keys: keys.clone(),
            token,
            ..Default::default()
        };
        let renewed = now.raw().renew(renew).await.unwrap().into_inner();
        assert_eq!(renewed.codes, [u32::from(code.to_wire())], "{caller:?}");
        token = renewed.lease.map_or(token, |lease| lease.token);
        let release = proto::ReleaseRequest {
            caller: caller.clone(),
            keys: keys.clone(),
            token,
            ..Default::default()
        };
        let released = now.raw().release(release).await.unwrap().into_inner();
        assert_eq!(released.codes, [u32::from(code.to_wire())], "{caller:?}");
    }
}
