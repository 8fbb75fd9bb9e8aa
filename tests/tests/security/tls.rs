//! Pools whose every port speaks TLS.
//!
//! `KVPOOL_FUZZ` sets the number of mutated handshakes for each port (500).

use kvpool_client::{Client, ClientFiles, Leasing, Options as ClientOptions, TransportChoice};
use kvpool_tests::blocks::{check_all, key, put_all};
use kvpool_tests::daemon::path_of;
use kvpool_tests::guard::{flags, world};
use kvpool_tests::outage::{Load, What};
use kvpool_tests::{Cluster, Options, fuzz, trust};
use kvpool_tls::testing::{Authority, Life, Pair};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longer than the interval at which a daemon checks its certificate files.
const LOOK: Duration = Duration::from_millis(1200);

fn start(nodes: usize, more: &[&str]) -> Cluster {
    let own = flags(&world().daemon, more);
    Cluster::start(Options {
        nodes,
        master: own.clone(),
        node: own,
        ..Options::default()
    })
    .unwrap()
}

/// The options of a client of `cluster` over TCP with these files.
fn with(cluster: &Cluster, tls: ClientFiles) -> ClientOptions {
    let mut options = cluster.client_options();
    options.tls = tls;
    options.transport = TransportChoice::Tcp;
    options.timeouts.connect = Duration::from_secs(3);
    options
}

/// Every port of a pool with one node: its name, its address, and its ALPN protocol.
fn ports(cluster: &Cluster) -> [(&'static str, &str, &'static str); 5] {
    let node = &cluster.nodes[0];
    [
        ("gRPC", &cluster.master.listen, "h2"),
        ("frames", &cluster.master.listen, "kvpool/1"),
        ("the master's HTTP", &cluster.master.http, "http/1.1"),
        ("data", &node.listen, "kvpool/1"),
        ("the node's HTTP", &node.http, "http/1.1"),
    ]
}

/// `openssl s_client` at a port, until the server ends the connection or half a second has passed.
fn s_client(address: &str, alpn: &str, more: &[&str]) -> (bool, String) {
    let mut client = Command::new("openssl")
        .args(["s_client", "-connect", address, "-alpn", alpn])
        .args(["-verify_return_error", "-CAfile"])
        .arg(&world().authority.ca)
        .args(more)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("openssl is installed");
    // It ends at the end of its input. With TLS 1.3 a refusal arrives only after the client's
    // handshake.
    let input = client.stdin.take();
    std::thread::sleep(Duration::from_millis(500));
    drop(input);
    let Output {
        status,
        stdout,
        stderr,
    } = client.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    (status.success() && !text.contains("alert"), text)
}

fn pair_flags(pair: &Pair) -> [String; 4] {
    let path = |path: &std::path::Path| path.display().to_string();
    [
        "-cert".to_owned(),
        path(&pair.cert),
        "-key".to_owned(),
        path(&pair.key),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_with_tls_everywhere_serves_every_operation() {
    let cluster = start(2, &[]);
    for (round, transport) in (0u64..).zip([TransportChoice::Tcp, TransportChoice::Auto]) {
        let client = Client::connect(ClientOptions {
            transport,
            ..cluster.client_options()
        })
        .await
        .unwrap();
        for (step, length) in (0u64..).zip([1, 4095, 65_536, 65_537, 1 << 20, (5 << 20) + 1]) {
            let begin = round * 1000 + step * 10;
            put_all(&client, begin..begin + 3, length).await.unwrap();
            let tally = check_all(&client, begin..begin + 3, length).await;
            assert_eq!(tally.right, 3, "{transport:?}, {length} bytes: {tally:?}");
        }
        let keys: Vec<_> = (0..4).map(|n| key(round * 1000 + n)).collect();
        let matched = client.match_prefix(&keys).await.unwrap();
        assert_eq!(matched.blocks, 3);
        let found = client.exist(&keys, Leasing::None).await.unwrap();
        assert_eq!(found.present, [true, true, true, false]);
    }
    // The metric shows when the certificates expire. Test certificates are valid for centuries.
    let century = 100.0 * 365.0 * 86400.0;
    for (daemon, prefix) in [(&cluster.master, "master"), (&cluster.nodes[0], "node")] {
        let metric = format!("kvpool_{prefix}_tls_certificate_expires_timestamp_seconds");
        assert!(daemon.metric(&metric).unwrap() > century, "{metric}");
    }
    // The node's address shows that its data port uses TLS.
    let nodes = cluster.master.http_get("/api/v1/nodes").unwrap();
    assert!(nodes.contains("tls://127.0.0.1:"), "{nodes}");
}

#[test]
fn ports_speak_tls_1_3_and_older_versions_only_where_they_are_asked_for() {
    let cluster = start(1, &[]);
    for (name, address, alpn) in ports(&cluster) {
        let (works, said) = s_client(address, alpn, &["-tls1_3"]);
        assert!(works, "{name}: {said}");
        assert!(
            said.contains(&format!("ALPN protocol: {alpn}")),
            "{name}: {said}"
        );
        assert!(said.contains("Cipher is TLS_AES_256_GCM_SHA384"), "{said}");
        let asks = said.contains("Requested Signature Algorithms")
            || said.contains("Acceptable client certificate CA names");
        assert_eq!(asks, !name.contains("HTTP"), "{name} asks: {said}");
        for old in ["-tls1_2", "-tls1_1"] {
            let (works, said) = s_client(address, alpn, &[old]);
            assert!(!works, "{name} speaks {old}: {said}");
        }
        // A plain connection gets no unencrypted answer.
        let mut plain = TcpStream::connect(address).unwrap();
        plain
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        let _cut = plain.read_to_end(&mut answer);
        assert!(
            answer.first().is_none_or(|&kind| kind == 21),
            "{name} answers {answer:?}"
        );
    }
    let cluster = start(1, &["--tls-min-version", "1.2"]);
    for (name, address, alpn) in ports(&cluster) {
        // Every client that speaks frames is of this project, and uses TLS 1.3.
        let expected = alpn != "kvpool/1";
        let (works, said) = s_client(address, alpn, &["-tls1_2"]);
        assert_eq!(works && said.contains("GCM"), expected, "{name}: {said}");
        let (works, said) = s_client(address, alpn, &["-tls1_1"]);
        assert!(!works, "{name}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn absent_expired_and_foreign_certificates_are_refused() {
    let world = world();
    let cluster = start(1, &["--tls-client-auth", "all"]);
    let expired = world.authority.sign("expired", Life::Expired);
    let stranger = Authority::new(world.directory.path(), "stranger");
    let foreign = stranger.sign("foreign", Life::Valid);
    let cases = [
        (None, "certificate required"),
        (Some(&expired), "certificate expired"),
        (Some(&foreign), "unknown ca"),
    ];
    for (name, address, alpn) in ports(&cluster) {
        let good = pair_flags(&world.client);
        let good: Vec<&str> = good.iter().map(String::as_str).collect();
        let (works, said) = s_client(address, alpn, &good);
        assert!(works, "{name}: {said}");
        for (pair, why) in cases {
            let more = pair.map(pair_flags);
            let more: Vec<&str> = more.iter().flatten().map(String::as_str).collect();
            let (works, said) = s_client(address, alpn, &more);
            // Probes present no certificate.
            assert_eq!(works, name.contains("HTTP"), "{name}: {said}");
            assert!(works || said.contains(why), "{name}: {said}");
        }
    }
    for (pair, _) in cases {
        let options = with(&cluster, world.authority.client(pair));
        let refused = Client::connect(options).await;
        assert!(refused.is_err(), "{pair:?}");
    }
    // A client that does not trust the server's authority.
    let options = with(&cluster, stranger.client(Some(&world.client)));
    assert!(Client::connect(options).await.is_err());
    let client = Client::connect(with(&cluster, trust::trusted())).await;
    let client = client.unwrap();
    put_all(&client, 0..4, 100_000).await.unwrap();
    assert_eq!(check_all(&client, 0..4, 100_000).await.right, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_call_to_a_port_with_tls_is_told_so() {
    let cluster = start(0, &[]);
    let mut options = with(&cluster, ClientFiles::default());
    options.masters = vec![format!("http://{}", cluster.master.listen)];
    let refused = Client::connect(options).await.unwrap_err().to_string();
    assert!(refused.contains("the port speaks TLS"), "{refused}");
    for wrong in ["does not answer", "Hello"] {
        assert!(!refused.contains(wrong), "{refused}");
    }
}

/// With mutual TLS between daemons, a client needs no certificate and a store node does.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_node_without_a_certificate_is_not_welcome() {
    let world = world();
    let cluster = start(1, &[]);
    let bare = Client::connect(with(&cluster, world.authority.client(None))).await;
    put_all(&bare.unwrap(), 0..2, 1000).await.unwrap();
    let ca = world.authority.ca.display().to_string();
    let flags = Cluster::flags_of_node(&cluster.master_url(), "intruder", &["--tls-ca", &ca]);
    let mut intruder =
        kvpool_tests::Daemon::spawn("kvstore-node", cluster.directory(), "intruder", &flags)
            .unwrap();
    cluster
        .wait_for("the refusal of a node without a certificate", || {
            Ok(intruder.log_text().contains("with a certificate only"))
        })
        .unwrap();
    let names: Vec<String> = cluster
        .node_states()
        .unwrap()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(names, ["node-0"]);
    intruder.kill().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_replaced_under_load_and_no_call_fails() {
    let world = world();
    let pair = world.authority.sign("rotating", Life::Valid);
    let own = flags(&pair, &[]);
    let cluster = Cluster::start(Options {
        nodes: 1,
        master: own.clone(),
        node: own,
        segment: "256MiB".into(),
        ..Options::default()
    })
    .unwrap();
    let options = with(&cluster, trust::trusted());
    let load = Load::default().start(&options).await.unwrap();
    let serial = |address: &str, alpn: &str| {
        let (works, said) = s_client(address, alpn, &[]);
        assert!(works, "{said}");
        let begin = said.find("-----BEGIN CERTIFICATE").expect("a certificate");
        said[begin..begin + 500].to_owned()
    };
    let mut before: Vec<String> = ports(&cluster)
        .iter()
        .map(|(_, address, alpn)| serial(address, alpn))
        .collect();
    for round in 0..3 {
        world.authority.sign("rotating", Life::Valid);
        tokio::time::sleep(LOOK).await;
        // New connections see the new certificate, and are served.
        let client = Client::connect(options.clone()).await.unwrap();
        let begin = 900_000 + round * 10;
        put_all(&client, begin..begin + 4, 100_000).await.unwrap();
        assert_eq!(check_all(&client, begin..begin + 4, 100_000).await.right, 4);
        for ((name, address, alpn), before) in ports(&cluster).into_iter().zip(&mut before) {
            let now = serial(address, alpn);
            assert_ne!(*before, now, "{name} presents the old certificate");
            *before = now;
        }
    }
    // A broken file is reported once, and the earlier certificate stays. A check between the two
    // files of a replacement may have caused a report before.
    let told = |daemon: &kvpool_tests::Daemon| {
        let log = daemon.log_text();
        log.matches("the certificates loaded before stay in use")
            .count()
    };
    let told_before = (told(&cluster.master), told(&cluster.nodes[0]));
    std::fs::write(&pair.cert, "no certificate").unwrap();
    tokio::time::sleep(LOOK).await;
    for _ in 0..3 {
        for ((name, address, alpn), before) in ports(&cluster).into_iter().zip(&before) {
            assert_eq!(*before, serial(address, alpn), "{name}");
        }
    }
    // One report for the certificate of the ports, and one for the certificate that the daemon
    // presents to others.
    for (daemon, before) in [
        (&cluster.master, told_before.0),
        (&cluster.nodes[0], told_before.1),
    ] {
        let told_now = told(daemon) - before;
        assert!((1..=2).contains(&told_now), "{told_now}");
    }
    let report = load.end().await.unwrap();
    for what in What::ALL {
        assert!(report.failures(what).is_empty(), "{what:?} failed");
    }
    assert!(report.acknowledged() > 0);
    assert_eq!((report.wrong(), report.missed()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn mutated_handshakes_cost_little_and_hurt_nobody() {
    let cluster = start(1, &[]);
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..4, 100_000).await.unwrap();
    let hello = client_hello();
    let cases = fuzz::cases(500);
    let resident = |cluster: &Cluster| {
        let node = cluster.nodes[0].resident_bytes().unwrap();
        cluster.master.resident_bytes().unwrap() + node
    };
    let before = resident(&cluster);
    for (name, address, _) in ports(&cluster) {
        let mut state = fuzz::seed();
        let mut random = move || {
            // xorshift64 is enough: a seed must repeat the mutations.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state >> 33).unwrap()
        };
        for _ in 0..cases {
            let mut bytes = hello.clone();
            for _ in 0..1 + random() % 8 {
                let at = random() % bytes.len();
                bytes[at] = u8::try_from(random() % 256).unwrap();
            }
            bytes.truncate(1 + random() % bytes.len());
            let mut stream = TcpStream::connect(address).unwrap_or_else(|error| {
                panic!("{name} takes no connection: {error}");
            });
            // The server may have closed already.
            let _cut = stream.write_all(&bytes);
        }
    }
    // A caller that never stops sending is cut off at about 64 KiB.
    for (name, address, _) in ports(&cluster) {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_write_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let begun = Instant::now();
        let mut sent = 0;
        // Handshake records of a message that announces 16 MiB.
        let record = [&[22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff][..], &[0; 16380]].concat();
        while stream.write_all(&record).is_ok() && sent < 64 << 20 {
            sent += record.len();
        }
        assert!(sent < 16 << 20, "{name} takes {sent} bytes");
        assert!(begun.elapsed() < Duration::from_secs(10), "{name}");
    }
    put_all(&client, 4..8, 100_000).await.unwrap();
    let fresh = cluster.client().await.unwrap();
    assert_eq!(check_all(&fresh, 0..8, 100_000).await.right, 8);
    let grown = resident(&cluster).saturating_sub(before);
    assert!(grown < 64 << 20, "the daemons have grown by {grown} bytes");
}

/// The operator's view, without a handshake that reads the files.
#[test]
fn certificates_that_cannot_be_used_are_told_until_they_can() {
    let world = world();
    let pair = world.authority.sign("unusable", Life::Valid);
    let own = flags(&pair, &[]);
    let cluster = Cluster::start(Options {
        nodes: 1,
        master: own.clone(),
        node: own,
        ..Options::default()
    })
    .unwrap();
    let failed = || {
        let metrics = [
            (&cluster.master, "kvpool_master_tls_files_failed"),
            (&cluster.nodes[0], "kvpool_node_tls_files_failed"),
        ];
        metrics.map(|(daemon, name)| daemon.metric(name).unwrap() > 0.0)
    };
    let kvctl = |command: &[&str]| {
        let output = Command::new(path_of("kvctl").unwrap())
            .args(command)
            .args(["--master", &cluster.master_url(), "--output", "json"])
            .arg("--tls-ca")
            .arg(&world.authority.ca)
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let commands: [&[&str]; 3] = [&["status"], &["doctor"], &["top", "--once"]];
    assert_eq!(failed(), [false; 2]);
    let said = "changed TLS files cannot be used";
    assert!(!kvctl(commands[0]).contains(said));
    std::fs::write(&pair.cert, "no certificate").unwrap();
    cluster
        .wait_for("the metrics", || Ok(failed() == [true; 2]))
        .unwrap();
    for command in commands {
        let is_told = || {
            let told = kvctl(command);
            let of_node = format!("node-0 says: {said}");
            Ok(told.contains(&of_node) && told.matches(said).count() > 1)
        };
        cluster.wait_for(command[0], is_told).unwrap();
    }
    world.authority.sign("unusable", Life::Valid);
    cluster
        .wait_for("files that can be used", || Ok(failed() == [false; 2]))
        .unwrap();
}

/// The first bytes of a real client.
fn client_hello() -> Vec<u8> {
    use kvpool_tls::rustls::ClientConnection;
    let tls = kvpool_tls::ClientTls::open(&trust::trusted())
        .unwrap()
        .unwrap();
    let name = tls.name_of("localhost:1").unwrap();
    let mut connection = ClientConnection::new(tls.frames(), name).unwrap();
    let mut hello = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut hello).unwrap();
    }
    hello
}

/// Starts a daemon that must either end by itself or be ready within 20 s. Returns whether it
/// serves, and its output.
fn serves(
    program: &str,
    flags: &[impl AsRef<std::ffi::OsStr>],
    environment: &[(&str, &str)],
) -> (bool, String) {
    let directory = TempDir::new().unwrap();
    let ready = directory.path().join("ready");
    let log = directory.path().join("log");
    let mut child = Command::new(path_of(program).unwrap())
        .args(["--http-listen", "127.0.0.1:0", "--ready-file"])
        .arg(&ready)
        .args(flags)
        .envs(environment.iter().copied())
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let limit = Instant::now() + Duration::from_secs(20);
    let served = loop {
        if ready.exists() {
            break true;
        }
        if child.try_wait().unwrap().is_some() {
            break false;
        }
        assert!(Instant::now() < limit, "{program} neither serves nor ends");
        std::thread::sleep(Duration::from_millis(10));
    };
    let _gone = child.kill();
    child.wait().unwrap();
    (served, std::fs::read_to_string(&log).unwrap())
}

#[test]
fn a_port_beyond_loopback_needs_tls_or_the_word_insecure() {
    let world = world();
    let directory = TempDir::new().unwrap();
    let file = directory.path().join("insecure.toml");
    std::fs::write(&file, "insecure = true\n").unwrap();
    let file = file.display().to_string();
    let own = flags(&world.daemon, &[]);
    let tls: Vec<&str> = own.iter().map(String::as_str).collect();
    let master: &[&str] = &["--listen", "0.0.0.0:0", "--data-dir", "data"];
    let node: &[&str] = &[
        "--listen",
        "0.0.0.0:0",
        "--advertise",
        "127.0.0.1",
        "--segment",
        "4MiB",
        "--no-shm",
    ];
    for (program, flags, variable) in [
        ("kvmaster", master, "KVMASTER_INSECURE"),
        ("kvstore-node", node, "KVSTORE_NODE_INSECURE"),
    ] {
        let (served, said) = serves(program, flags, &[]);
        assert!(!served, "{program}: {said}");
        for part in ["0.0.0.0:", "--insecure", "--tls-cert"] {
            assert!(said.contains(part), "{program}: {said}");
        }
        let with = |more: &[&str]| -> Vec<String> {
            let all = flags.iter().chain(more);
            all.map(|flag| (*flag).to_owned()).collect()
        };
        let warns = "anyone who reaches";
        let (served, said) = serves(program, &with(&["--insecure"]), &[]);
        assert!(served && said.matches(warns).count() == 1, "{said}");
        let (served, said) = serves(program, flags, &[(variable, "true")]);
        assert!(served && said.contains(warns), "{said}");
        let (served, said) = serves(program, &with(&["--config", &file]), &[]);
        assert!(served && said.contains(warns), "{said}");
        let (served, said) = serves(program, &with(&tls), &[]);
        assert!(served, "{said}");
        // On loopback a daemon still needs no flags.
        let near: Vec<&str> = flags
            .iter()
            .map(|flag| match *flag {
                "0.0.0.0:0" => "127.0.0.1:0",
                other => other,
            })
            .collect();
        let (served, said) = serves(program, &near, &[]);
        assert!(served && !said.contains(warns), "{said}");
    }
}
