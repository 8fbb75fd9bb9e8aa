//! No output of a pool contains a secret. The outputs are logs at the lowest level,
//! `--print-config`, metrics, pages, the output of kvctl, and the `Debug` of settings.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use kvpool_auth::{Authority, Credentials};
use kvpool_client::Client;
use kvpool_etcd::testing::{Etcd, Setup};
use kvpool_tests::daemon::{self, path_of};
use kvpool_tests::guard::{Tokens, flags, world};
use kvpool_tests::raw::Port;
use kvpool_tests::{Daemon, masters, trust};
use kvpool_tls::{ALPN_HTTP, ClientTls};
use kvpool_types::Token;
use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// The password of etcd's user.
const PASSWORD: &str = "marked-password-4f1c86ab";
/// A token that unknown callers present at several ports.
const GARBAGE: &str = "bWFya2VkIGdhcmJhZ2U.aW4gdGhlIHBsYWNl.b2YgYSB0b2tlbiA5ZDNmNzFl";
/// The length of a piece that counts as a secret. A shorter piece may occur by chance.
const PIECE: usize = 20;

/// A secret, and the printable forms of its pieces.
struct Secret {
    name: String,
    forms: Vec<String>,
}

impl Secret {
    fn new(name: impl Into<String>, text: &str) -> Self {
        let text = text.trim();
        let piece = PIECE.min(text.len());
        let middle = (text.len() - piece) / 2;
        let pieces = [
            &text[..piece],
            &text[middle..middle + piece],
            &text[text.len() - piece..],
        ];
        let mut forms = Vec::new();
        for piece in pieces {
            let bytes = piece.as_bytes();
            let hex = bytes.iter().fold(String::new(), |mut hex, byte| {
                let _infallible = write!(hex, "{byte:02x}");
                hex
            });
            let listed = format!("{bytes:?}");
            forms.extend([
                piece.to_owned(),
                hex.to_uppercase(),
                hex,
                listed.trim_matches(['[', ']']).to_owned(),
            ]);
        }
        // Basic credentials: the length of the name before the token shifts the groups of three
        // bytes.
        for shift in 0..3 {
            let shifted = format!("{}{text}", "x".repeat(shift));
            for encoded in [STANDARD.encode(&shifted), URL_SAFE_NO_PAD.encode(&shifted)] {
                forms.push(encoded[4..encoded.len().min(4 + PIECE)].to_owned());
            }
        }
        Self {
            name: name.into(),
            forms,
        }
    }

    fn is_in(&self, text: &str) -> bool {
        self.forms.iter().any(|form| text.contains(form.as_str()))
    }
}

/// All outputs, each with the program that printed it.
#[derive(Default)]
struct Said(Vec<(String, String)>);

impl Said {
    fn add(&mut self, by: impl Into<String>, text: impl Into<String>) {
        self.0.push((by.into(), text.into()));
    }

    fn finds(&self, secrets: &[Secret]) -> Vec<String> {
        let mut finds = Vec::new();
        for secret in secrets {
            let told = self.0.iter().filter(|(_, text)| secret.is_in(text));
            finds.extend(told.map(|(by, _)| format!("{} in {by}", secret.name)));
        }
        finds
    }
}

/// The signature of a token, which is its secret part.
fn signature(token: &str) -> &str {
    token.trim().rsplit('.').next().unwrap()
}

fn file(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn secrets(tokens: &Tokens) -> Vec<Secret> {
    let mut secrets = vec![
        Secret::new("etcd's password", PASSWORD),
        Secret::new("an unknown token", signature(GARBAGE)),
    ];
    for subject in ["root", "node", "writer"] {
        let token = file(&tokens.file(subject));
        secrets.push(Secret::new(
            format!("the token of {subject}"),
            signature(&token),
        ));
    }
    for (name, pair) in [
        ("the daemons", &world().daemon),
        ("a client", &world().client),
    ] {
        let pem = file(&pair.key);
        let lines: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
        // The algorithm is at the beginning, and the public half at the end.
        secrets.push(Secret::new(
            format!("the private key of {name}"),
            &lines[lines.len() / 4..lines.len() / 2],
        ));
    }
    secrets
}

#[test]
fn the_scanner_finds_what_is_planted_in_any_form() {
    let text = "c2VjcmV0IHBhcnQgb2YgYSB0b2tlbi1hYmNkZWZnaGlqaw";
    let secret = Secret::new("planted", text);
    let hex = |text: &str| -> String { text.bytes().map(|b| format!("{b:02X}")).collect() };
    for planted in [
        format!("token={text};"),
        format!("head {}", &text[..24]),
        format!("tail {}", &text[text.len() - 24..]),
        format!("hex {}", hex(text)),
        format!("bytes {:?}", text.as_bytes()),
        format!("json {}", serde_json::json!({ "token": text })),
        format!("Basic {}", STANDARD.encode(format!("me:{text}"))),
        format!("Basic {}", STANDARD.encode(format!("user:{text}"))),
        format!("Basic {}", STANDARD.encode(format!("a:{text}"))),
    ] {
        let mut said = Said::default();
        said.add("a log", format!("before\n{planted}\nafter"));
        let finds = said.finds(std::slice::from_ref(&secret));
        assert_eq!(finds, ["planted in a log"], "{planted}");
    }
    let mut said = Said::default();
    said.add("a log", "subject=writer path=/tmp/writer.token");
    assert_eq!(said.finds(&[secret]), Vec::<String>::new());
}

/// The flags of a kvmaster, and an etcd with a password if etcd is installed.
async fn master_flags(directory: &Path, tokens: &Tokens) -> (Option<Etcd>, Vec<String>) {
    let mut all = [flags(&world().daemon, &[]), tokens.flags()].concat();
    let ports = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
    all.extend(ports.map(str::to_owned));
    if !masters::available("the part of secrets that needs etcd") {
        let data = directory.join("data").display().to_string();
        all.extend(["--data-dir".to_owned(), data]);
        return (None, all);
    }
    let setup = Setup {
        tls: true,
        password: Some(PASSWORD.to_owned()),
        ..Setup::default()
    };
    let etcd = Etcd::start_with(&directory.join("etcd"), &setup)
        .await
        .unwrap();
    let password = directory.join("password");
    std::fs::write(&password, PASSWORD).unwrap();
    let options = etcd.options();
    let tls = options.tls.unwrap();
    let path = |path: &Path| path.display().to_string();
    for (flag, value) in [
        ("--etcd", etcd.endpoints().join(",")),
        ("--etcd-user", options.user.unwrap().0),
        ("--etcd-password-file", path(&password)),
        ("--etcd-ca", path(&tls.ca)),
        ("--etcd-cert", path(&tls.cert.unwrap())),
        ("--etcd-key", path(&tls.key.unwrap())),
    ] {
        all.extend([flag.to_owned(), value]);
    }
    (Some(etcd), all)
}

fn node_flags(directory: &Path, tokens: &Tokens, master: &str) -> Vec<String> {
    let mut all = [flags(&world().daemon, &[]), tokens.node_flags()].concat();
    let socket = directory.join("node.sock").display().to_string();
    let own = [
        "--master",
        master,
        "--listen",
        "127.0.0.1:0",
        "--http-listen",
        "127.0.0.1:0",
        "--segment",
        "64MiB",
        "--shm-path",
        &socket,
    ];
    all.extend(own.map(str::to_owned));
    all
}

/// The whole output of a program at the lowest log level.
fn output(program: &str, arguments: &[&str], token: &Path) -> String {
    let files = trust::trusted();
    let output = Command::new(path_of(program).unwrap())
        .args(arguments)
        .env("RUST_LOG", "trace")
        .env("KVPOOL_TOKEN_FILE", token)
        .env("KVPOOL_TLS_CA", files.ca.unwrap())
        .env("KVPOOL_TLS_CERT", files.cert.unwrap())
        .env("KVPOOL_TLS_KEY", files.key.unwrap())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    format!("{}\n{}", output.status, String::from_utf8_lossy(&said))
}

/// The first bytes of an HTTP port's answer to a request.
fn http(address: &str, request: &str) -> String {
    let tls = ClientTls::open(&trust::trusted()).unwrap().unwrap();
    let mut config = (*tls.grpc()).clone();
    config.alpn_protocols = vec![ALPN_HTTP.to_vec()];
    let name = tls.name_of(address).unwrap();
    let connection = kvpool_tls::rustls::ClientConnection::new(config.into(), name).unwrap();
    let socket = std::net::TcpStream::connect(address).unwrap();
    // The stream of events does not end.
    socket
        .set_read_timeout(Some(Duration::from_secs(2)))
        .unwrap();
    let mut stream = kvpool_tls::rustls::StreamOwned::new(connection, socket);
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _cut = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Presents unknown tokens to every port.
fn offer_garbage(master: &Daemon, node: &Daemon, socket: &Path) -> String {
    let mut said = String::new();
    let basic = STANDARD.encode(format!("me:{GARBAGE}"));
    for daemon in [master, node] {
        for line in [
            format!("Authorization: Bearer {GARBAGE}"),
            format!("Authorization: Basic {basic}"),
            format!("Authorization: {GARBAGE}"),
        ] {
            let request = format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n");
            said += &http(&daemon.http, &request);
        }
    }
    let mut port = Port::<UnixStream>::open_unix(socket).unwrap();
    let refused = port.hello_with(Default::default(), Token::from(GARBAGE.to_owned()));
    said + &format!("{:?}", refused.unwrap().unwrap_err())
}

/// The HTTP paths of both daemons.
fn paths() -> Vec<&'static str> {
    let sources = [
        include_str!("../../../master/src/service/http.rs"),
        include_str!("../../../master/src/service/page.rs"),
        include_str!("../../../daemon/src/probe.rs"),
    ];
    let routes = sources
        .iter()
        .flat_map(|source| source.split(".route(\"").skip(1));
    let mut paths: Vec<&str> = routes.filter_map(|rest| rest.split('"').next()).collect();
    paths.push("/nothing");
    assert!(paths.len() > 10, "{paths:?}");
    paths
}

/// The `Debug` output of every type that holds a secret.
fn debugs(tokens: &Tokens, password: &Path) -> Said {
    let mut said = Said::default();
    let root = file(&tokens.file("root"));
    let token = Token::from(root.trim().to_owned());
    said.add("Debug of Token", format!("{token:?}"));
    let credentials = [
        Credentials::fixed(token.clone()),
        Credentials::file(&tokens.file("root")),
    ];
    said.add("Debug of Credentials", format!("{credentials:?}"));
    said.add(
        "Debug of Current",
        format!("{:?}", credentials[1].current()),
    );
    let options = kvpool_client::Options {
        token,
        tls: trust::trusted(),
        ..Default::default()
    };
    said.add("Debug of client options", format!("{options:?}"));
    let tls = ClientTls::open(&trust::trusted()).unwrap();
    said.add("Debug of ClientTls", format!("{tls:?}"));
    let settings = kvpool_auth::AuthSettings {
        jwks: tokens.jwks(),
        issuer: "x".to_owned(),
        audience: "kvpool".to_owned(),
        policy: tokens.jwks().with_file_name("policy.toml"),
    };
    let authority = Authority::open(settings).unwrap();
    let refused = authority.judge(&root);
    said.add("Debug of Authority", format!("{authority:?} {refused:?}"));
    said.add("Debug of Tokens", format!("{tokens:?}"));
    let master = kvpool_master::Config {
        etcd_user: "root".to_owned(),
        etcd_password_file: Some(password.to_owned()),
        tls_key: Some(world().daemon.key.clone()),
        ..Default::default()
    };
    said.add("Debug of the master's settings", format!("{master:?}"));
    let mut etcd = kvpool_etcd::Options::new(vec!["http://127.0.0.1:1".to_owned()]);
    etcd.user = Some(("root".to_owned(), PASSWORD.to_owned()));
    said.add("Debug of etcd's options", format!("{etcd:?}"));
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_a_pool_says_holds_a_secret() {
    let directory = TempDir::with_prefix("kvpool-secrets-").unwrap();
    let at = directory.path();
    let tokens = Tokens::new().unwrap();
    tokens.write("writer", 3600).unwrap();
    daemon::log_at("trace");
    let (_etcd, master_flags) = master_flags(at, &tokens).await;
    let secrets = secrets(&tokens);
    let mut said = debugs(&tokens, &at.join("password"));

    let master = Daemon::start("kvmaster", at, "kvmaster", &master_flags).unwrap();
    let url = format!("https://{}", master.listen);
    let node_flags = node_flags(at, &tokens, &url);
    let node = Daemon::start("kvstore-node", at, "node", &node_flags).unwrap();
    let options = kvpool_client::Options {
        masters: vec![url.clone()],
        tls: trust::trusted(),
        token_file: Some(tokens.file("writer")),
        ..Default::default()
    };
    let client = Client::connect(options).await.unwrap();
    kvpool_tests::blocks::put_all(&client, 0..20, 50_000)
        .await
        .unwrap();
    let right = kvpool_tests::blocks::check_all(&client, 0..20, 50_000)
        .await
        .right;
    assert_eq!(right, 20);
    // A renewed token, and a refused one.
    tokens.write("writer", 1800).unwrap();
    tokio::time::sleep(Duration::from_millis(1200)).await;
    kvpool_tests::blocks::put_all(&client, 20..24, 50_000)
        .await
        .unwrap();
    let garbage = at.join("garbage.token");
    std::fs::write(&garbage, GARBAGE).unwrap();

    tokio::task::block_in_place(|| {
        said.add(
            "refusals",
            offer_garbage(&master, &node, &at.join("node.sock")),
        );
        let block = at.join("block");
        std::fs::write(&block, "bytes").unwrap();
        let block = block.display().to_string();
        for (command, file) in [
            (&["put", "x", &block][..], "writer"),
            (&["get", "x"], "writer"),
            (&["ls"], "writer"),
            (&["status"], "root"),
            (&["cluster"], "root"),
            (&["doctor"], "root"),
            (&["doctor", "--output", "json"], "root"),
            (&["namespace", "list"], "root"),
            (&["describe", "x"], "writer"),
            (&["rm", "x"], "reader"),
        ] {
            let file = match file {
                "reader" => garbage.clone(),
                subject => tokens.file(subject),
            };
            let text = output("kvctl", &[&["--master", &url], command].concat(), &file);
            assert!(text.len() > 40, "{command:?}: {text}");
            said.add(format!("kvctl {command:?}"), text);
        }
        for (program, own) in [("kvmaster", &master_flags), ("kvstore-node", &node_flags)] {
            let own: Vec<&str> = own.iter().map(String::as_str).collect();
            let printed = output(program, &[&own[..], &["--print-config"]].concat(), &garbage);
            assert!(printed.contains("auth_jwks"), "{printed}");
            said.add(format!("{program} --print-config"), printed);
        }
        let bearer = file(&tokens.file("root"));
        for (name, daemon) in [("kvmaster", &master), ("kvstore-node", &node)] {
            for path in paths() {
                let request = format!(
                    "GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n",
                    bearer.trim()
                );
                said.add(format!("{path} of {name}"), http(&daemon.http, &request));
            }
            let process = format!("/proc/{}/cmdline", daemon.pid());
            said.add(
                format!("the arguments of {name}"),
                file(Path::new(&process)),
            );
        }
        // A signing key, and tokens signed with it.
        let keys = at.join("keys").display().to_string();
        let create = [
            "token",
            "create",
            "--subject",
            "x",
            "--role",
            "operator",
            "--dir",
            &keys,
        ];
        let made = output("kvctl", &create, &garbage);
        let token = at.join("keys/x.token").display().to_string();
        let inspect = ["token", "inspect", &token, "--dir", &keys];
        let seen = output("kvctl", &inspect, &garbage);
        assert!(
            made.contains("x.token") && seen.contains("verified"),
            "{made}{seen}"
        );
        said.add("kvctl token create", made);
        said.add("kvctl token inspect", seen);
    });
    let key: serde_json::Value =
        serde_json::from_str(&file(&at.join("keys/signing-key.json"))).unwrap();
    let mut secrets = secrets;
    let x = file(&at.join("keys/x.token"));
    secrets.extend([
        Secret::new("the signing key", key["d"].as_str().unwrap()),
        Secret::new("the token of x", signature(&x)),
        Secret::new(
            "the second token of writer",
            signature(&file(&tokens.file("writer"))),
        ),
    ]);
    for (name, daemon) in [("kvmaster", &master), ("kvstore-node", &node)] {
        let log = daemon.log_text();
        let talkative = log.contains(" TRACE ") || log.contains("TRACE");
        assert!(talkative && log.len() > 10_000, "{name} says {}", log.len());
        said.add(format!("the log of {name}"), log);
    }
    let bytes: usize = said.0.iter().map(|(_, text)| text.len()).sum();
    println!(
        "{} texts of {bytes} bytes, {} secrets",
        said.0.len(),
        secrets.len()
    );
    assert_eq!(said.finds(&secrets), Vec::<String>::new());
    // The scanner finds secrets that are really printed.
    let root = file(&tokens.file("root"));
    said.add("a planted line", format!("token={root}"));
    assert_eq!(
        said.finds(&secrets),
        ["the token of root in a planted line"]
    );
}
