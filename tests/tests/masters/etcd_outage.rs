//! Outages of etcd, and the state of a term that must not outlive it.
//!
//! `KVPOOL_ETCD_OUTAGE_SECONDS=30` sets the length of the outage; the default is 10 s.

use kvpool_client::{PutBlock, PutOptions};
use kvpool_proto as proto;
use kvpool_tests::blocks::{bytes_of, check_all, key, put_all, source};
use kvpool_tests::daemon::path_of;
use kvpool_tests::grants::{Control, Granted};
use kvpool_tests::masters::{self, Options, Pool};
use kvpool_tests::outage::{Load, Report, Summary, What};
use kvpool_tests::raw::Port;
use kvpool_tests::{Daemon, Hand};
use kvpool_types::wire::data::{Meta, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Checksum, Code};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;
const HELD: u64 = 1 << 20;

fn outage() -> Duration {
    let asked = std::env::var("KVPOOL_ETCD_OUTAGE_SECONDS").ok();
    Duration::from_secs(asked.and_then(|text| text.parse().ok()).unwrap_or(10))
}

async fn judge(pool: &Pool, report: &Report) {
    let mut summary = Summary::default();
    summary.add(report);
    println!(
        "{summary}{} puts acknowledged, failed {:?}",
        report.acknowledged(),
        report.failures(What::Put)
    );
    let client = pool.client().await.unwrap();
    assert_eq!(report.lost_and_wrong(&client).await.unwrap(), (0, 0));
    assert_eq!((report.wrong(), report.missed()), (0, 0));
    assert!(report.epochs_gone_back().is_empty());
}

/// Runs a command of kvctl against all masters of the pool.
fn kvctl(pool: &Pool, command: &str) -> Output {
    Command::new(path_of("kvctl").unwrap())
        .args([
            command,
            "--output",
            "json",
            "--master",
            &pool.urls().join(","),
        ])
        .output()
        .unwrap()
}

/// Whether the output tells an operator that the leader is read-only.
fn says_read_only(output: &Output) -> bool {
    String::from_utf8_lossy(&output.stdout).contains("is read-only, because its lease in etcd")
}

/// An operator of a new pool sees at once why nothing serves. Port 1 refuses connections.
#[test]
fn a_master_whose_etcd_does_not_answer_says_so_at_once() {
    let place = tempfile::tempdir().unwrap();
    let ports = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
    let flags = ["--etcd", "http://127.0.0.1:1"].into_iter().chain(ports);
    let flags: Vec<String> = flags.map(str::to_owned).collect();
    let master = Daemon::spawn("kvmaster", place.path(), "kvmaster", &flags).unwrap();
    let limit = Instant::now() + Duration::from_secs(15);
    while !master.log_text().contains("waiting for etcd") {
        assert!(Instant::now() < limit, "{}", master.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_death_of_etcds_leader_costs_no_acknowledged_block() {
    if !masters::available("the_death_of_etcds_leader_costs_no_acknowledged_block") {
        return;
    }
    let options = Options {
        etcd: 3,
        ..Options::default()
    };
    let mut pool = Pool::start(options).unwrap();
    let mut load = Load::default().start(&pool.client_options()).await.unwrap();
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let member = pool.store.leader().unwrap();
        load.event("kill -9 of etcd's leader, of three");
        pool.store.kill(member).unwrap();
        let settled = load.wait_success(&What::ALL, Instant::now() + Duration::from_secs(3), LIMIT);
        settled.await.unwrap();
        load.event("its member is back");
        pool.store.restart(member).unwrap();
    }
    let report = load.end().await.unwrap();
    judge(&pool, &report).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_etcd_reads_go_on_and_puts_wait_and_say_why() {
    if !masters::available("without_etcd_reads_go_on_and_puts_wait_and_say_why") {
        return;
    }
    let mut pool = Pool::start(Options::default()).unwrap();
    let mut load = Load::default().start(&pool.client_options()).await.unwrap();
    let client = pool.client().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let begun = load.event("all of etcd gone");
    pool.store.kill_all().unwrap();

    // Longer than the last leader's term.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let patience = Duration::from_secs(3);
    let options = PutOptions {
        timeout: Some(patience),
        ..PutOptions::default()
    };
    let asked = Instant::now();
    let put = PutBlock::new(key(1 << 40), source(&key(1 << 40), 1000));
    let refused = client.batch_put(vec![put], &options).await.remove(0);
    let (refused, took) = (refused.unwrap_err(), asked.elapsed());
    println!("a put in the meantime, after {took:?}: {refused}");
    assert!(
        took + Duration::from_secs(1) > patience,
        "it did not wait: {took:?}"
    );
    assert!(took < patience + Duration::from_secs(1), "{took:?}");
    assert!(refused.is_retryable(), "{refused:?}");
    let reason = refused.to_string();
    assert!(
        reason.contains("etcd") || reason.contains("metadata store"),
        "it does not say why: {reason}"
    );
    let status = kvctl(&pool, "status");
    assert!(
        status.status.success() && says_read_only(&status),
        "{status:?}"
    );
    let doctor = kvctl(&pool, "doctor");
    assert_eq!(doctor.status.code(), Some(4), "{doctor:?}");
    assert!(says_read_only(&doctor), "{doctor:?}");

    tokio::time::sleep_until((begun + outage()).into()).await;
    // Reads continued to the end.
    let late = Instant::now() - Duration::from_secs(2);
    let reads = [What::Get, What::Lookup];
    load.wait_success(&reads, late, Duration::ZERO)
        .await
        .unwrap_or_else(|error| panic!("{error}\n{}", pool.logs()));
    load.event("etcd is back");
    pool.store.restart_all().unwrap();
    let resumed = load.wait_success(&What::ALL, Instant::now(), LIMIT).await;
    resumed.unwrap_or_else(|error| panic!("{error}\n{}", pool.logs()));
    pool.wait_settled().unwrap();
    for command in ["status", "doctor"] {
        let output = kvctl(&pool, command);
        assert!(
            output.status.success() && !says_read_only(&output),
            "{output:?}"
        );
    }
    put_all(&client, 1 << 40..(1 << 40) + 1, 1000)
        .await
        .unwrap();
    let report = load.end().await.unwrap();
    let (_, gaps) = &report.gaps()[0];
    assert!(gaps.lookup < Duration::from_secs(5), "{gaps:?}");
    assert!(gaps.get < Duration::from_secs(5), "{gaps:?}");
    judge(&pool, &report).await;
}

/// Two masters and one small node, so that every extent is soon granted again if it may be.
fn small_pool() -> Pool {
    let options = Options {
        masters: 2,
        nodes: 1,
        segment: "16MiB".into(),
        ..Options::default()
    };
    Pool::start(options.master(&["--lease-ttl", "300ms"])).unwrap()
}

/// Puts twice the pool's size.
async fn refill(client: &kvpool_client::Client) {
    for number in 0..128 {
        put_all(client, number..number + 1, MIB / 4).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_memory_writer_of_the_last_term_touches_nobody_elses_extent() {
    if !masters::available("a_shared_memory_writer_of_the_last_term_touches_nobody_elses_extent") {
        return;
    }
    let mut pool = small_pool();
    let leader = pool.leader().unwrap();
    let length = HELD.to_string();
    let url = pool.url(leader.index);
    let mut hand = Hand::start(&["write", &url, "900", &length, "60000"]).unwrap();
    hand.line().unwrap();
    hand.pause().unwrap();
    pool.kill(leader.index).unwrap();
    pool.wait_leader(leader.epoch).unwrap();
    pool.wait_live(1).unwrap();

    let client = pool.client().await.unwrap();
    refill(&client).await;
    let before = check_all(&client, 0..128, MIB / 4).await;
    assert_eq!((before.wrong, before.failed), (0, 0));
    assert!(before.right > 30, "{before:?}");
    hand.resume().unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let after = check_all(&client, 0..128, MIB / 4).await;
    assert_eq!(after, before, "the writer changed a block of another");
    hand.kill().unwrap();
    pool.wait_for("the extent", || Ok(pool.gauge("quarantine_bytes")? < HELD))
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tcp_writer_of_the_last_term_is_cut_off() {
    if !masters::available("a_tcp_writer_of_the_last_term_is_cut_off") {
        return;
    }
    let mut pool = small_pool();
    let leader = pool.leader().unwrap();
    let mut control = Control::connect(&pool.url(leader.index)).await.unwrap();
    let granted = control.reserve(&key(900), HELD, 60_000).await.unwrap();
    let mut port = Port::open(&granted.data_address).unwrap();
    port.hello(control.cluster).unwrap();
    let request = WriteRequest {
        incarnation: granted.incarnation,
        grants: vec![granted.grant],
    };
    let payload = request.payload_bytes().unwrap();
    port.announce(Op::Write, control.epoch, &request.to_bytes(), payload)
        .unwrap();
    let garbage = vec![0xee; MIB / 2];
    port.bytes(&garbage).unwrap();
    pool.kill(leader.index).unwrap();
    pool.wait_leader(leader.epoch).unwrap();
    pool.wait_live(1).unwrap();

    let client = pool.client().await.unwrap();
    refill(&client).await;
    let _broken = port.bytes(&garbage);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let tally = check_all(&client, 0..128, MIB / 4).await;
    assert_eq!((tally.wrong, tally.failed), (0, 0));
    // The grant is no longer accepted.
    let mut port = Port::open(&granted.data_address).unwrap();
    port.hello(control.cluster).unwrap();
    let whole = vec![0xee; usize::try_from(payload).unwrap()];
    let codes = port.codes(Op::Write, control.epoch, &request.to_bytes(), &whole);
    assert!(
        !matches!(codes.as_deref(), Ok([Code::Ok])),
        "a write under the last term was taken"
    );
    assert_eq!(check_all(&client, 0..128, MIB / 4).await, tally);
}

/// Makes each step of a put by hand, up to the commit.
async fn write_by_hand(control: &mut Control, number: u64) -> (Granted, Checksum) {
    let granted = control.reserve(&key(number), 4096, 60_000).await.unwrap();
    let mut port = Port::open(&granted.data_address).unwrap();
    port.hello(control.cluster).unwrap();
    let request = WriteRequest {
        incarnation: granted.incarnation,
        grants: vec![granted.grant],
    };
    let bytes = bytes_of(&key(number), 4096);
    let checksum = kvpool_transport::checksum::checksum(&bytes);
    // The block has one chunk, whose checksum follows it.
    let payload = [&bytes[..], &checksum.0.to_le_bytes()].concat();
    let codes = port
        .codes(Op::Write, control.epoch, &request.to_bytes(), &payload)
        .unwrap();
    assert_eq!(codes, [Code::Ok]);
    (granted, checksum)
}

/// The requests wait in the stopped leader's sockets. The leader reads them as soon as it
/// continues, before it learns that its term is over.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_was_stopped_acknowledges_and_grants_nothing_when_it_goes_on() {
    if !masters::available(
        "a_leader_that_was_stopped_acknowledges_and_grants_nothing_when_it_goes_on",
    ) {
        return;
    }
    let options = Options {
        masters: 2,
        nodes: 1,
        ..Options::default()
    };
    let pool = Pool::start(options).unwrap();
    for round in 0..5 {
        let leader = pool.wait_settled().unwrap();
        pool.wait_live(1).unwrap();
        let url = pool.url(leader.index);
        let mut committing = Control::connect(&url).await.unwrap();
        let mut reserving = Control::connect(&url).await.unwrap();
        let number = 100 * round;
        let (granted, checksum) = write_by_hand(&mut committing, number).await;
        pool.pause(leader.index).unwrap();
        let commit =
            tokio::spawn(async move { committing.commit(&key(number), &granted, checksum).await });
        let reserve = tokio::spawn(async move {
            let reserved = reserving.reserve(&key(number + 1), 4096, 60_000).await;
            reserved.map(|granted| granted.grant)
        });
        let next = pool.wait_leader(leader.epoch).unwrap();
        pool.wait_live(1).unwrap();
        assert!(!commit.is_finished() && !reserve.is_finished());
        pool.resume(leader.index).unwrap();
        let committed = commit.await.unwrap();
        println!("round {round}: the commit {committed:?}");
        assert!(
            !matches!(committed, Ok(Code::Ok)),
            "a deposed leader acknowledged a commit"
        );
        let reserved = reserve.await.unwrap();
        println!("round {round}: the reserve {reserved:?}");
        assert!(reserved.is_err(), "a deposed leader granted {reserved:?}");

        // A client can put the key again under the new leader.
        let client = pool.client().await.unwrap();
        put_all(&client, number..number + 2, 4096).await.unwrap();
        assert_eq!(check_all(&client, number..number + 2, 4096).await.right, 2);
        let mut control = Control::connect(&pool.url(next.index)).await.unwrap();
        let caller = control.caller();
        let cluster = control
            .raw()
            .cluster(proto::ClusterRequest {
                caller,
                overview: false,
            })
            .await;
        assert_eq!(cluster.unwrap().into_inner().role, "leader");
    }
}
