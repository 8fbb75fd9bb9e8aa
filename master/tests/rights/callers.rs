//! A real master whose callers need tokens, and the callers.

use kvpool_auth::issue::{SigningKey, publish};
use kvpool_auth::{Role, Roles, now};
use kvpool_master::{Config, Server};
use kvpool_proto as proto;
use kvpool_types::Code;
use parking_lot::Mutex;
use proto::pool_client::PoolClient;
use serde_json::json;
use tempfile::TempDir;
use tonic::transport::Channel;

/// The namespace of all calls.
pub(crate) const NAMESPACE: &str = "a";
const ISSUER: &str = "https://issuer.example";

pub(crate) const POLICY: &str = r#"
[[rule]]
subject = "reader"
roles = ["reader"]
namespaces = ["a", "a-*"]
[[rule]]
subject = "writer"
roles = ["writer"]
namespaces = ["a"]
[[rule]]
subject = "admin"
roles = ["admin"]
namespaces = ["a"]
[[rule]]
subject = "other"
roles = ["admin"]
namespaces = ["b"]
[[rule]]
subject = "root"
roles = ["admin"]
namespaces = ["*"]
[[rule]]
subject = "node"
roles = ["node"]
[[rule]]
subject = "operator"
roles = ["operator"]
"#;

/// A caller: its token, and its roles in the policy above.
pub(crate) struct Caller {
    pub(crate) name: &'static str,
    pub(crate) token: String,
    /// The code of every refusal, for a token that every call refuses.
    pub(crate) refused: Option<Code>,
    pub(crate) here: Roles,
    pub(crate) elsewhere: Roles,
    pub(crate) pool: Roles,
}

pub(crate) struct Fixture {
    directory: TempDir,
    key: Mutex<SigningKey>,
    pub(crate) server: Server,
}

impl Fixture {
    pub(crate) async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let key = SigningKey::generate().unwrap();
        publish(&key, &path("jwks.json")).unwrap();
        std::fs::write(path("policy.toml"), POLICY).unwrap();
        let config = Config {
            listen: "127.0.0.1:0".to_owned(),
            http_listen: "127.0.0.1:0".to_owned(),
            data_dir: path("data"),
            auth_jwks: Some(path("jwks.json")),
            auth_issuer: ISSUER.to_owned(),
            auth_policy: Some(path("policy.toml")),
            ..Config::default()
        };
        let server = Server::start(config).await.unwrap();
        Self {
            directory,
            key: Mutex::new(key),
            server,
        }
    }

    pub(crate) async fn stop(self) {
        self.server.stop().await;
    }

    /// A token of the pool's issuer that expires in `seconds`.
    pub(crate) fn token(&self, subject: &str, seconds: i64) -> String {
        let expires = now().saturating_add_signed(seconds);
        self.sign(&self.key.lock(), subject, ISSUER, "kvpool", expires)
    }

    fn sign(
        &self,
        key: &SigningKey,
        subject: &str,
        issuer: &str,
        audience: &str,
        expires: u64,
    ) -> String {
        key.sign_claims(&json!({
            "sub": subject, "iss": issuer, "aud": audience, "exp": expires,
        }))
        .unwrap()
    }

    pub(crate) fn callers(&self) -> Vec<Caller> {
        let key = self.key.lock();
        let later = now() + 600;
        let good = self.sign(&key, "root", ISSUER, "kvpool", later);
        let foreign = SigningKey::generate().unwrap();
        let refused = |name, token, code| Caller {
            name,
            token,
            refused: Some(code),
            here: Roles::NONE,
            elsewhere: Roles::NONE,
            pool: Roles::NONE,
        };
        let claims = good.split('.').nth(1).unwrap();
        // {"alg":"none"} and {"alg":"HS256"}, for a caller that claims to be root.
        let none = format!("eyJhbGciOiJub25lIn0.{claims}.");
        let shared = format!("eyJhbGciOiJIUzI1NiJ9.{claims}.AAAA");
        let mut callers = vec![
            refused("nobody", String::new(), Code::Unauthenticated),
            refused(
                "an expired token",
                self.sign(&key, "root", ISSUER, "kvpool", now() - 60),
                Code::TokenExpired,
            ),
            refused(
                "a token for another audience",
                self.sign(&key, "root", ISSUER, "other", later),
                Code::Unauthenticated,
            ),
            refused(
                "a token of another issuer",
                self.sign(&key, "root", "https://other.example", "kvpool", later),
                Code::Unauthenticated,
            ),
            refused(
                "a token of another key",
                self.sign(&foreign, "root", ISSUER, "kvpool", later),
                Code::Unauthenticated,
            ),
            refused("a token without a signature", none, Code::Unauthenticated),
            refused(
                "a token with a shared secret",
                shared,
                Code::Unauthenticated,
            ),
        ];
        let one = |role| Roles::of(&[role]);
        let none = Roles::NONE;
        for (name, here, elsewhere, pool) in [
            ("stranger", none, none, none),
            ("reader", one(Role::Reader), none, none),
            ("writer", one(Role::Writer), none, none),
            ("admin", one(Role::Admin), none, none),
            ("other", none, one(Role::Admin), none),
            ("root", one(Role::Admin), none, one(Role::Admin)),
            ("node", none, none, one(Role::Node)),
            ("operator", none, none, one(Role::Operator)),
        ] {
            callers.push(Caller {
                name,
                token: self.sign(&key, name, ISSUER, "kvpool", later),
                refused: None,
                here,
                elsewhere,
                pool,
            });
        }
        callers
    }

    pub(crate) fn write_policy(&self, text: &str) {
        std::fs::write(self.directory.path().join("policy.toml"), text).unwrap();
    }

    /// Replaces the issuer's key by another one.
    pub(crate) fn replace_key(&self) {
        let fresh = SigningKey::generate().unwrap();
        let jwks = json!({ "keys": [fresh.public_jwk()] }).to_string();
        std::fs::write(self.directory.path().join("jwks.json"), jwks).unwrap();
        *self.key.lock() = fresh;
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.server.grpc_address())
    }

    pub(crate) async fn client(&self) -> PoolClient<Channel> {
        PoolClient::connect(self.url()).await.unwrap()
    }

    pub(crate) fn caller(&self, namespace: &str) -> proto::Caller {
        proto::Caller {
            client_id: vec![7; 16].into(),
            namespace: namespace.to_owned(),
            ..Default::default()
        }
    }

    /// A request with a token.
    pub(crate) fn request<M>(&self, message: M, token: &str) -> tonic::Request<M> {
        let mut request = tonic::Request::new(message);
        if !token.is_empty() {
            let value = format!("Bearer {token}").parse().unwrap();
            request.metadata_mut().insert("authorization", value);
        }
        request
    }
}
