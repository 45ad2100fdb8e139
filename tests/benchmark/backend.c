/* A stand-in for llama-server that is too fast to be the bottleneck of a benchmark.
 *
 *   backend PORT DELAY_MS EVENTS INTERVAL_MS
 *
 * Answers chats in llama-server's shapes: plain ones after DELAY_MS, streams with EVENTS events INTERVAL_MS apart, with
 * timings on every event and a usage chunk if they are asked for, and closes the connection after a stream. One
 * thread, loopback only. Ends with SIGTERM, or by itself after 15 minutes. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 4096, BUFFER = 65536 };

struct connection {
    int fd, used, streaming, sent, timings, usage, closing;
    double due; /* when the next thing is to be sent; 0: nothing is */
    char buffer[BUFFER];
};

static struct connection *connections[MOST];
static int epoll, active[MOST], actives;
static double delay, interval;
static int events;

static const char plain[] =
    "{\"choices\":[{\"finish_reason\":\"length\",\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
    "\"Good morning to all of you in this room, and thank you for having me here today.\"}}],\"created\":1796077871,"
    "\"model\":\"bench\",\"system_fingerprint\":\"b1-bench\",\"object\":\"chat.completion\",\"usage\":"
    "{\"completion_tokens\":18,\"prompt_tokens\":36,\"total_tokens\":54,\"prompt_tokens_details\":{\"cached_tokens\":20}},"
    "\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"timings\":{\"cache_n\":20,\"prompt_n\":16,\"prompt_ms\":11.03,"
    "\"prompt_per_token_ms\":0.689,\"prompt_per_second\":1450.6,\"predicted_n\":18,\"predicted_ms\":95.8,"
    "\"predicted_per_token_ms\":5.322,\"predicted_per_second\":187.9}}";
static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":1,\"owned_by\":\"llamacpp\"}]}";
static const char tail[] =
    "\"created\":1796077871,\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"model\":\"bench\","
    "\"system_fingerprint\":\"b1-bench\",\"object\":\"chat.completion.chunk\"";

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static void drop(struct connection *c) {
    close(c->fd);
    for (int i = 0; i < actives; i++)
        if (active[i] == c->fd) {
            active[i] = active[--actives];
            break;
        }
    connections[c->fd] = NULL;
    free(c);
}

static void wake_at(struct connection *c, double when) {
    if (!c->due) active[actives++] = c->fd;
    c->due = when;
}

static void sleep_(struct connection *c) {
    c->due = 0;
    for (int i = 0; i < actives; i++)
        if (active[i] == c->fd) {
            active[i] = active[--actives];
            return;
        }
}

static int put(struct connection *c, const char *data, int size) { /* buffers of loopback hold all that is sent here */
    return send(c->fd, data, size, MSG_NOSIGNAL) == size;
}

static int answer(struct connection *c, const char *body) {
    char head[4096];
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: application/json; charset=utf-8\r\n"
                        "Keep-Alive: timeout=5, max=100\r\nContent-Length: %zu\r\n\r\n%s",
                        strlen(body), body);
    return put(c, head, size);
}

static int chunk(struct connection *c, const char *data, int size) {
    char framed[4096];
    int length = snprintf(framed, sizeof framed, "%x\r\n%.*s\r\n", size, size, data);
    return put(c, framed, length);
}

static int timings(char *at, int room, int made) {
    return snprintf(at, room,
                    ",\"timings\":{\"cache_n\":20,\"prompt_n\":16,\"prompt_ms\":11.03,\"prompt_per_token_ms\":0.689,"
                    "\"prompt_per_second\":1450.6,\"predicted_n\":%d,\"predicted_ms\":%d.8,"
                    "\"predicted_per_token_ms\":5.322,\"predicted_per_second\":187.9}",
                    made, made * 5);
}

static int event(struct connection *c) { /* one event of a stream; 0 when the client has gone */
    char text[4096];
    int size = 0, i = c->sent++, room = sizeof text;
    if (i < events) {
        size = snprintf(text, room, "data: {\"choices\":[{\"finish_reason\":null,\"index\":0,\"delta\":{\"content\":\" token%d\"}}],%s", i, tail);
        if (c->timings) size += timings(text + size, room - size, i + 1);
        size += snprintf(text + size, room - size, "}\n\n");
        return chunk(c, text, size);
    }
    size = snprintf(text, room, "data: {\"choices\":[{\"finish_reason\":\"length\",\"index\":0,\"delta\":{}}],%s", tail);
    if (c->usage)
        size += snprintf(text + size, room - size,
                         "}\n\ndata: {\"choices\":[],%s,\"usage\":{\"completion_tokens\":%d,\"prompt_tokens\":36,\"total_tokens\":%d,"
                         "\"prompt_tokens_details\":{\"cached_tokens\":20}}",
                         tail, events, events + 36);
    size += timings(text + size, room - size, events);
    size += snprintf(text + size, room - size, "}\n\ndata: [DONE]\n\n");
    int fine = chunk(c, text, size) && put(c, "0\r\n\r\n", 5);
    c->closing = 1;
    return fine;
}

static int request(struct connection *c) { /* handles one request in the buffer; 0: drop the connection */
    char *end = memmem(c->buffer, c->used, "\r\n\r\n", 4);
    if (!end) return c->used < BUFFER;
    *end = 0;
    char *field = strcasestr(c->buffer, "content-length:");
    *end = '\r';
    int length = field && field < end ? atoi(field + 15) : 0, total = end + 4 - c->buffer + length;
    if (total > BUFFER) return 0;
    if (c->used < total) return 1;
    char *body = end + 4;
    int fine = 1;
    if (!strncmp(c->buffer, "GET /health", 11)) fine = answer(c, "{\"status\":\"ok\"}");
    else if (!strncmp(c->buffer, "GET /v1/models", 14)) fine = answer(c, models);
    else if (!strncmp(c->buffer, "GET /props", 10)) fine = answer(c, "{\"total_slots\":1000}");
    else if (memmem(body, length, "\"stream\":true", 13) || memmem(body, length, "\"stream\": true", 14)) {
        static const char head[] = "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
                                   "Keep-Alive: timeout=5, max=100\r\nTransfer-Encoding: chunked\r\n\r\n";
        c->streaming = 1;
        c->sent = 0;
        c->timings = memmem(body, length, "\"timings_per_token\":true", 24) != NULL;
        c->usage = memmem(body, length, "\"include_usage\":true", 20) || memmem(body, length, "\"include_usage\": true", 21);
        fine = put(c, head, sizeof head - 1);
        wake_at(c, now() + interval);
    } else if (delay > 0) {
        c->streaming = 0;
        wake_at(c, now() + delay);
    } else
        fine = answer(c, plain);
    memmove(c->buffer, c->buffer + total, c->used - total);
    c->used -= total;
    return fine;
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    delay = atof(arguments[2]);
    events = atoi(arguments[3]);
    interval = atof(arguments[4]);
    alarm(900);
    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(arguments[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1024)) return perror("listen"), 1;
    fcntl(listener, F_SETFL, O_NONBLOCK);
    epoll = epoll_create1(0);
    struct epoll_event wanted = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &wanted);
    for (;;) {
        double next = 1e18, time = now();
        for (int i = 0; i < actives; i++)
            if (connections[active[i]]->due < next) next = connections[active[i]]->due;
        int wait = actives ? (next > time ? (int)(next - time) + 1 : 0) : 1000;
        int found = epoll_wait(epoll, ready, 256, wait);
        for (int i = 0; i < found; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) {
                while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    if (fd >= MOST) {
                        close(fd);
                        continue;
                    }
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    connections[fd] = calloc(1, sizeof(struct connection));
                    connections[fd]->fd = fd;
                    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
                    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
                }
                continue;
            }
            struct connection *c = connections[fd];
            if (!c) continue;
            int got = recv(fd, c->buffer + c->used, BUFFER - c->used, 0);
            if (got == 0 || (got < 0 && errno != EAGAIN)) {
                drop(c);
                continue;
            }
            if (got > 0) c->used += got;
            if (!request(c)) drop(c);
        }
        time = now();
        for (int i = actives - 1; i >= 0; i--) {
            struct connection *c = connections[active[i]];
            if (c->due > time) continue;
            int fine;
            if (c->streaming) {
                fine = event(c);
                c->due += interval;
            } else {
                fine = answer(c, plain);
                sleep_(c);
            }
            if (!fine || c->closing) drop(c);
        }
    }
}
